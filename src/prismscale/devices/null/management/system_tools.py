"""Puts ``nvidia-smi``, the file beside this one, on the PATH of programs that call the command.

A real ``nvidia-smi`` is hidden along with the GPUs that it would report.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from prismscale.devices.null.cuda_api import CUDA_VERSION
from prismscale.devices.null.cuda_bindings import uuid_of
from prismscale.devices.null.gpus import NullDeviceSpec
from prismscale.devices.null.management.nvml import DRIVER, Readings

_HERE = Path(__file__).parent
_VARIABLE = "PRISMSCALE_NVIDIA_SMI"
_MIB = 1 << 20
_UNITS = {
    "memory.total": "MiB",
    "memory.used": "MiB",
    "memory.free": "MiB",
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "power.draw": "W",
    "clocks.sm": "MHz",
}


def install(spec: NullDeviceSpec) -> None:
    """Let commands that this process starts find the null node's ``nvidia-smi``."""
    os.environ[_VARIABLE] = json.dumps(node(spec))
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if str(_HERE) not in places:
        os.environ["PATH"] = os.pathsep.join([str(_HERE), *places])


def node(spec: NullDeviceSpec) -> dict[str, object]:
    """Return all figures that the command reports, by the names of its fields."""
    now = Readings()
    total, used = spec.total_memory_bytes // _MIB, spec.context_bytes // _MIB
    shared = {
        "name": spec.name,
        "gpu_name": spec.name,
        "count": spec.devices_per_node,
        "driver_version": DRIVER,
        "compute_cap": f"{spec.capability[0]}.{spec.capability[1]}",
        "memory.total": total,
        "memory.used": used,
        "memory.free": total - used,
        "utilization.gpu": now.utilization_percent,
        "utilization.memory": now.utilization_percent,
        "temperature.gpu": now.temperature_celsius,
        "power.draw": now.power_milliwatts // 1000,
        "clocks.sm": now.clock_mhz,
    }
    gpus = [
        {"index": index, "uuid": f"GPU-{uuid_of(index)}", "gpu_uuid": f"GPU-{uuid_of(index)}"}
        | shared
        for index in range(spec.devices_per_node)
    ]
    link = f"NV{spec.nvlinks}"
    return {"cuda_version": CUDA_VERSION, "units": _UNITS, "link": link, "gpus": gpus}
