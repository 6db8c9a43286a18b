"""Switch the null CUDA device on in this process, and reach into it.

:func:`activate` compiles the extension if need be, loads it, and makes ``torch.cuda`` answer as the
chosen GPU. It acts once, for the life of the process, and wants to come before the program's first
CUDA call or backward pass (autograd counts the devices when it first runs).
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass

from prismscale.devices.null import (
    bindings,
    cuda_api,
    cuda_bindings,
    packed_attention,
    torch_profiler,
)
from prismscale.devices.null.build import build_extension
from prismscale.devices.null.compiled import regions
from prismscale.devices.null.flex import block_masks
from prismscale.devices.null.flex import operators as flex_operators
from prismscale.devices.null.gpus import NullDeviceSpec
from prismscale.devices.null.libraries import flash_attention_3, nvml
from prismscale.devices.null.libraries.catalogue import stand_ins
from prismscale.devices.null.libraries.import_finder import StandInFinder
from prismscale.devices.null.memory.allocator_config import AllocatorConfig, config_from_environment
from prismscale.devices.null.memory.memory_history import MemoryHistory
from prismscale.devices.null.value_policy import ValueLedger, ValuePolicy
from prismscale.errors import PrismscaleError, UsageError
from prismscale.torch_versions import installed_cudnn, installed_torch

# Until a kernel model is set: plausible for small kernels, and never zero, because programs divide
# by elapsed time. They are placeholders and reported as such ("default"), not predictions.
DEFAULT_DEVICE_NS = 5_000
DEFAULT_HOST_NS = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class NullRuntime:
    """The active null device: its library, what it pretends to be, and what stands in."""

    library: ctypes.PyDLL
    spec: NullDeviceSpec
    ledger: ValueLedger
    history: MemoryHistory
    stand_ins: StandInFinder


_active: NullRuntime | None = None


def active() -> NullRuntime:
    """The runtime of this process; raises PrismscaleError before :func:`activate`."""
    if _active is None:
        raise PrismscaleError("the null CUDA device is not active here; call activate() first")
    return _active


def activate(
    spec: NullDeviceSpec, *, policy: ValuePolicy | None = None, lower: bool = True
) -> NullRuntime:
    """Make ``torch.cuda`` the null device ``spec``; a second call with the same spec is harmless.

    Args:
        lower: let inductor lower what the program compiles; otherwise it runs eagerly.

    Raises UsageError where torch already has a real CUDA device in use, where another spec is
    active, or where the extension cannot be compiled.
    """
    global _active
    if _active is not None:
        if _active.spec != spec:
            raise UsageError(
                f"the null device is {_active.spec.name} in this process already and cannot become "
                f"{spec.name}; start another process"
            )
        return _active
    library = bindings.load(build_extension())
    library.ps_install(ctypes.byref(_settings(spec)))
    library.ps_set_capability(*spec.capability)
    library.ps_set_cudnn(installed_cudnn())
    library.ps_set_launch_queue_depth(spec.launch_queue_depth)
    library.ps_set_cost(None, DEFAULT_DEVICE_NS, DEFAULT_HOST_NS)
    ledger = ValueLedger(library, policy or ValuePolicy())
    history = MemoryHistory(library, spec.devices_per_node)
    cuda_api.install(library, spec, history)
    nvml.install(library, spec)
    cuda_bindings.install(spec)
    torch_profiler.install()
    flex_operators.install()
    packed_attention.install()
    block_masks.install(library.ps_without_cost)
    regions.install(library, lower=lower)
    finder = StandInFinder(stand_ins())
    finder.begin()
    flash_attention_3.serve_torch(finder)
    _active = NullRuntime(
        library=library, spec=spec, ledger=ledger, history=history, stand_ins=finder
    )
    return _active


def _settings(spec: NullDeviceSpec) -> bindings.SettingsRow:
    config = config_from_environment()
    return settings_row(spec, config)


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
