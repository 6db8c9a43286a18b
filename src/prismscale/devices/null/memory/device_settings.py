"""Settings of device and allocator: those at the start, and the program's changes to them.

torch reads PYTORCH_ALLOC_CONF and CUBLAS_WORKSPACE_CONFIG when CUDA starts, not when torch is
imported, and launchers set them in ``os.environ`` after ``import torch``. Later,
``torch.cuda.memory._set_allocator_settings`` changes single settings.
"""

from __future__ import annotations

import ctypes
import os
import re

import torch

from prismscale.devices.null import bindings
from prismscale.devices.null.gpus import NullDeviceSpec
from prismscale.devices.null.memory.allocator_config import (
    AllocatorConfig,
    parse_config,
    text_from_environment,
)
from prismscale.torch_versions import installed_torch


class ProgramSettings:
    """The allocator settings that the program has given so far."""

    def __init__(self, library: ctypes.PyDLL, spec: NullDeviceSpec) -> None:
        self._library = library
        self._spec = spec
        self._changed: list[str] = []

    def change(self, text: str) -> None:
        """Add ``key:value,key:value`` to the settings, where they override earlier ones.

        Raises UsageError for a key that torch does not have.
        """
        parse_config(text)
        self._changed.append(text)
        # Before CUDA has started the text is only noted: the start of CUDA applies it.
        if torch.cuda.is_initialized():
            self.apply()

    def text(self) -> str:
        """Return all settings so far: the environment's, then the program's changes."""
        return ",".join(filter(None, [text_from_environment(), *self._changed]))

    def apply(self) -> None:
        """Apply all settings. The environment is read again, as CUDA does when it starts."""
        config = parse_config(self.text())
        self._library.ps_configure(ctypes.byref(settings_row(self._spec, config)))


def settings_row(spec: NullDeviceSpec, config: AllocatorConfig) -> bindings.SettingsRow:
    """Return device and allocator settings in the form that the extension takes."""
    return bindings.SettingsRow(
        devices=spec.devices_per_node,
        total_bytes=spec.total_memory_bytes,
        outside_bytes=spec.context_bytes,
        blas_workspace_bytes=_blas_workspace_bytes(spec),
        max_split_bytes=config.max_split_bytes,
        max_non_split_rounding_bytes=config.max_non_split_rounding_bytes,
        large_segment_bytes=config.large_segment_bytes,
        expandable_segments=int(config.expandable_segments),
        graph_capture_record_stream_reuse=int(config.graph_capture_record_stream_reuse),
        multiprocessors=spec.multi_processor_count,
        roundup_power2_divisions=(ctypes.c_int64 * 16)(*config.roundup_power2_divisions),
        garbage_collection_threshold=config.garbage_collection_threshold,
        memory_fraction=config.memory_fraction,
    )


def _blas_workspace_bytes(spec: NullDeviceSpec) -> int:
    """Return the bytes that ``CUBLAS_WORKSPACE_CONFIG`` gives, or the default of the GPU.

    The variable holds ``:size:count`` pairs with sizes in KiB.
    """
    text = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", text)
    if not pairs:
        return spec.blas_workspace_bytes(installed_torch() or "")
    return sum(int(size) * int(count) * 1024 for size, count in pairs)
