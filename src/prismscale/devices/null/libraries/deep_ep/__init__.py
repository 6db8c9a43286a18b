"""DeepEP 1: ``deep_ep_cpp``, under the library's own Python code.

Tokens go to the ranks of their experts, each once to a rank, by kernels of the library. That is an
all_to_all here, of as many bytes. Low-latency kernels, which are for inference, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION = "deep_ep_cpp"


def stand_in() -> StandIn:
    """The stand-in for version 1."""
    return StandIn(
        name="DeepEP",
        namespace="deep_ep",
        modules={_EXTENSION: _make_extension},
        python="deep_ep",
        distribution="deep_ep",
        around={"deep_ep.buffer": _told_of_groups},
    )


def _make_extension() -> ModuleType:
    from prismscale.devices.null.libraries.deep_ep import buffer, buffer_sizes

    content = {
        "Buffer": buffer.Buffer,
        "Config": buffer_sizes.Config,
        "EventHandle": buffer.EventHandle,
        "is_sm90_compiled": lambda: True,
    }
    return module_of(_EXTENSION, content, library="DeepEP")


@contextmanager
def _told_of_groups(module: Any) -> Iterator[None]:
    """The extension gets ranks' numbers alone; what communicates for it is the process group."""
    yield
    initialize = module.Buffer.__init__

    def told(self: Any, group: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, group, *arguments, **named)
        self.runtime.group = group

    module.Buffer.__init__ = told
