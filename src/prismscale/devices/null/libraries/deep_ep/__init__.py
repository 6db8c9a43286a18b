"""Stand-ins for DeepEP 1 and HybridEP (``deep_ep_cpp``, ``hybrid_ep_cpp``) under their Python code.

Kernels of the library send tokens to the ranks of their experts, each token once to a rank. Here
this is an all_to_all of as many bytes. Low-latency kernels, which are for inference, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION, _HYBRID_EXTENSION = "deep_ep_cpp", "hybrid_ep_cpp"


def stand_in() -> StandIn:
    """Return the stand-in for version 1."""
    return StandIn(
        name="DeepEP",
        namespace="deep_ep",
        modules={_EXTENSION: _make_extension, _HYBRID_EXTENSION: _make_hybrid_extension},
        python="deep_ep",
        distribution="deep_ep",
        around={"deep_ep.buffer": _told_of_groups},
    )


def _make_extension() -> ModuleType:
    import torch

    from prismscale.devices.null.libraries.deep_ep import buffer, buffer_sizes

    content = {
        "Buffer": buffer.Buffer,
        "Config": buffer_sizes.Config,
        "EventHandle": buffer.EventHandle,
        "is_sm90_compiled": lambda: True,
        "topk_idx_t": torch.int64,
    }
    return module_of(_EXTENSION, content, library="DeepEP")


def _make_hybrid_extension() -> ModuleType:
    from prismscale.devices.null.libraries.deep_ep import hybrid_buffer, hybrid_config

    content = {
        "APP_TOKEN_DATA_TYPE": hybrid_config.TokenType,
        "BufferConfig": hybrid_config.BufferConfig,
        "Configurer": hybrid_config.Configurer,
        "ExtendedMemoryAllocator": hybrid_config.ExtendedMemoryAllocator,
        "HandleImpl": hybrid_config.HandleImpl,
        "HybridEPBuffer": hybrid_buffer.HybridEPBuffer,
        "HybridEpConfigInstance": hybrid_config.HybridEpConfigInstance,
        **hybrid_config.TokenType.__members__,
    }
    return module_of(_HYBRID_EXTENSION, content, library="HybridEP")


@contextmanager
def _told_of_groups(module: Any) -> Iterator[None]:
    """Give the process group to the extension, which gets only rank numbers from the library.

    The process group communicates for the extension.
    """
    yield
    initialize = module.Buffer.__init__

    def told(self: Any, group: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, group, *arguments, **named)
        self.runtime.group = group

    module.Buffer.__init__ = told
