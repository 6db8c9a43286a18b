"""Activation of the null CUDA device in this process.

:func:`activate` compiles the extension if needed, loads it, and makes ``torch.cuda`` answer as the
chosen GPU. It acts once, for the life of the process. It must run before the program's first CUDA
call or backward pass, because autograd counts the devices when it first runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from prismscale.devices.null import (
    bindings,
    cuda_api,
    cuda_bindings,
    shape_rules,
    torch_profiler,
)
from prismscale.devices.null.build import build_extension
from prismscale.devices.null.compiled import regions
from prismscale.devices.null.flex import block_masks
from prismscale.devices.null.flex import operators as flex_operators
from prismscale.devices.null.gpus import NullDeviceSpec
from prismscale.devices.null.libraries.catalogue import stand_ins
from prismscale.devices.null.libraries.flash_attention import flash_attention_3, hub_kernels
from prismscale.devices.null.libraries.import_finder import StandInFinder
from prismscale.devices.null.management import nvml, system_tools
from prismscale.devices.null.memory.allocator_config import config_from_environment
from prismscale.devices.null.memory.device_settings import settings_row
from prismscale.devices.null.memory.memory_history import MemoryHistory
from prismscale.devices.null.value_policy import ValueLedger, ValuePolicy
from prismscale.errors import PrismscaleError, UsageError
from prismscale.torch_versions import installed_cudnn

# Costs until a kernel model is set. They are plausible for small kernels, and not zero, because
# programs divide by elapsed time. They are placeholders, not predictions, and reported as
# "default".
DEFAULT_DEVICE_NS = 5_000
DEFAULT_HOST_NS = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class NullRuntime:
    """The active null device: its extension, the GPU it imitates, its ledgers and stand-ins."""

    library: ctypes.PyDLL
    spec: NullDeviceSpec
    ledger: ValueLedger
    history: MemoryHistory
    stand_ins: StandInFinder


_active: NullRuntime | None = None


def active() -> NullRuntime:
    """Return the runtime of this process; raises PrismscaleError before :func:`activate`."""
    if _active is None:
        raise PrismscaleError("the null CUDA device is not active here; call activate() first")
    return _active


def activate(
    spec: NullDeviceSpec, *, policy: ValuePolicy | None = None, lower: bool = True
) -> NullRuntime:
    """Make ``torch.cuda`` the null device ``spec``; a second call with the same spec does nothing.

    Args:
        spec: the GPU to imitate.
        policy: answers to reads of unknown values; None: the default ones.
        lower: whether inductor lowers what the program compiles; otherwise it runs eagerly.

    Raises:
        UsageError: another spec is active, or the extension cannot be compiled.
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
    library.ps_install(ctypes.byref(settings_row(spec, config_from_environment())))
    library.ps_set_capability(*spec.capability)
    library.ps_set_cudnn(installed_cudnn())
    library.ps_set_launch_queue_depth(spec.launch_queue_depth)
    library.ps_set_cost(None, DEFAULT_DEVICE_NS, DEFAULT_HOST_NS)
    ledger = ValueLedger(library, policy or ValuePolicy())
    history = MemoryHistory(library, spec.devices_per_node)
    cuda_api.install(library, spec, history)
    nvml.install(library, spec)
    system_tools.install(spec)
    cuda_bindings.install(spec)
    torch_profiler.install()
    flex_operators.install()
    shape_rules.install()
    block_masks.install(library.ps_without_cost)
    regions.install(library, lower=lower)
    finder = StandInFinder(stand_ins())
    finder.begin()
    flash_attention_3.serve_torch(finder)
    hub_kernels.serve_hub(finder)
    _active = NullRuntime(
        library=library, spec=spec, ledger=ledger, history=history, stand_ins=finder
    )
    return _active
