"""Settings of device and allocator: what the extension starts with, and what a program changes.

torch reads PYTORCH_ALLOC_CONF and CUBLAS_WORKSPACE_CONFIG when CUDA starts, not when it is
imported: launchers set them in ``os.environ`` after ``import torch``. Later,
``torch.cuda.memory._set_allocator_settings`` changes what it names.
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
    """The settings that a program has given so far."""

    def __init__(self, library: ctypes.PyDLL, spec: NullDeviceSpec) -> None:
        self._library = library
        self._spec = spec
        self._changed: list[str] = []

    def change(self, text: str) -> None:
        """``key:value,key:value`` on top of all that was set; raises UsageError for a key that
        torch does not have."""
        parse_config(text)
        self._changed.append(text)
        # Before CUDA starts it is noted only: starting applies it.
        if torch.cuda.is_initialized():
            self.apply()

    def text(self) -> str:
        """All that was set."""
        return ",".join(filter(None, [text_from_environment(), *self._changed]))

    def apply(self) -> None:
        """Read the environment again, as the program left it; CUDA does so when it starts."""
        config = parse_config(self.text())
        self._library.ps_configure(ctypes.byref(settings_row(self._spec, config)))


def settings_row(spec: NullDeviceSpec, config: AllocatorConfig) -> bindings.SettingsRow:
    """Device and allocator settings as the extension takes them."""
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
    """``CUBLAS_WORKSPACE_CONFIG`` (``:size:count`` pairs in KiB) or the default of the GPU."""
    text = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", text)
    if not pairs:
        return spec.blas_workspace_bytes(installed_torch() or "")
    return sum(int(size) * int(count) * 1024 for size, count in pairs)
