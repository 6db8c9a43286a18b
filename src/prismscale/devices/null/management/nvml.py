"""``pynvml``, NVIDIA's management library, for the GPUs of the null node.

Names, memory and versions are those of the null device. Readings that only a running chip has are
constants: it is always busy, at the temperature and power of :class:`Readings`. If this machine has
a real NVML, it is hidden along with the GPUs that it would report.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from prismscale.devices.null.cuda_bindings import index_of, uuid_of
from prismscale.devices.null.gpus import NullDeviceSpec

DRIVER = "580.65.06"
"""A driver version of CUDA 13.0, the version that the null device reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """Constant readings of a GPU's sensors."""

    utilization_percent: int = 100
    temperature_celsius: int = 60
    power_milliwatts: int = 500_000
    clock_mhz: int = 1_500


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlDevice:
    """Handle of a device."""

    index: int


class NVMLError(Exception):
    """NVML's error, as ``pynvml`` raises it."""


def install(library: ctypes.PyDLL, spec: NullDeviceSpec) -> None:
    """Let ``import pynvml`` and ``torch.cuda`` find the null node."""
    module = make_module(library, spec)
    sys.modules["pynvml"] = module
    for name, value in (("pynvml", module), ("_HAS_PYNVML", True)):
        setattr(torch.cuda, name, value)
    # On a CUDA build torch would count the machine's own GPUs.
    for name in ("_device_count_nvml", "_raw_device_count_nvml"):
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, lambda: spec.devices_per_node)


def make_module(library: ctypes.PyDLL, spec: NullDeviceSpec) -> types.ModuleType:
    """Return the module. A function of NVML that it lacks raises :class:`NVMLError` when called."""
    module = types.ModuleType("pynvml", __doc__)
    for name, value in {**_functions(library, spec), "NVMLError": NVMLError}.items():
        setattr(module, name, value)
    module.__getattr__ = _other_name  # type: ignore[method-assign]
    return module


@cache  # returns the same error class each time, so that programs can catch it
def _other_name(name: str) -> Any:
    """Return an attribute of ``pynvml`` that is not in :func:`_functions`."""
    if name.startswith("NVMLError_"):
        return type(name, (NVMLError,), {})
    if name.startswith("NVML_"):
        return 0  # a constant; the functions here ignore the constants that they take
    if name.startswith("nvml"):
        return _unsupported(name)
    raise AttributeError(f"module 'pynvml' has no attribute {name!r}")


def _unsupported(name: str) -> Callable[..., None]:
    def unsupported(*_: Any) -> None:
        raise NVMLError(f"{name}: Not Supported by the null CUDA device of prismscale")

    return unsupported


def _functions(library: ctypes.PyDLL, spec: NullDeviceSpec) -> dict[str, Any]:
    readings = Readings()

    def handle(index: int) -> NvmlDevice:
        if not 0 <= index < spec.devices_per_node:
            raise NVMLError(f"Invalid Argument: the null node has {spec.devices_per_node} devices")
        return NvmlDevice(index=index)

    def handle_of(text: str | bytes) -> NvmlDevice:
        try:
            return handle(index_of(text.decode() if isinstance(text, bytes) else text))
        except ValueError as error:
            raise NVMLError(f"Invalid Argument: {error}") from error

    def memory(device: NvmlDevice, version: int = 1) -> types.SimpleNamespace:
        free = int(library.ps_free_bytes(device.index))
        total = spec.total_memory_bytes
        return types.SimpleNamespace(total=total, free=free, used=total - free)

    busy = types.SimpleNamespace(
        gpu=readings.utilization_percent, memory=readings.utilization_percent
    )
    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: DRIVER,
        "nvmlDeviceGetCount": lambda: spec.devices_per_node,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetHandleByUUID": handle_of,
        "nvmlDeviceGetUUID": lambda device: f"GPU-{uuid_of(device.index)}",
        "nvmlDeviceGetIndex": lambda device: device.index,
        "nvmlDeviceGetName": lambda device: spec.name,
        "nvmlDeviceGetCudaComputeCapability": lambda device: spec.capability,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda device: busy,
        "nvmlDeviceGetTemperature": lambda device, sensor: readings.temperature_celsius,
        "nvmlDeviceGetPowerUsage": lambda device: readings.power_milliwatts,
        "nvmlDeviceGetClockInfo": lambda device, clock: readings.clock_mhz,
        "nvmlDeviceGetComputeRunningProcesses": lambda device: [],
        # NVML_P2P_STATUS_OK is 0, as all constants are here. NVLink joins the devices of a node.
        "nvmlDeviceGetP2PStatus": lambda device, other, capability: 0,
        # Processes of an emulated rank stay where the scheduler puts them.
        "nvmlDeviceSetCpuAffinity": lambda device: None,
        "nvmlDeviceClearCpuAffinity": lambda device: None,
    }
