"""``cuda.bindings``, CUDA's own Python interface: which GPU is current, and its UUID.

Programs ask it where a GPU is in the node, to run on the CPU socket next to it. The package itself
is the program's. The functions that these programs call and that need a driver are replaced here.
All others return their error code, as without a GPU.
"""

from __future__ import annotations

import types
import uuid
from typing import Any

import torch

from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.gpus import NullDeviceSpec

NODE = uuid.UUID("6e756c6c-6465-7669-6365-000000000000")
"""UUID of a node's first GPU. GPU ``i`` of the node has this number plus ``i``."""


def uuid_of(index: int) -> uuid.UUID:
    """Return the UUID of the GPU ``index`` of the node."""
    return uuid.UUID(int=NODE.int + index)


def index_of(text: str) -> int:
    """Return the index of the GPU with the UUID ``text``, with or without the prefix ``GPU-``.

    Raises:
        ValueError: ``text`` is no UUID.
    """
    return uuid.UUID(text.removeprefix("GPU-")).int - NODE.int


def install(spec: NullDeviceSpec) -> None:
    """Make the package answer for the null node, now or when the program imports it."""

    def serve_runtime(runtime: Any) -> None:
        done = runtime.cudaError_t.cudaSuccess
        runtime.cudaGetDevice = lambda: (done, torch.cuda.current_device())
        runtime.cudaGetDeviceCount = lambda: (done, spec.devices_per_node)

    def serve_driver(driver: Any) -> None:
        def get_uuid(device: Any) -> tuple[Any, Any]:
            if not 0 <= int(device) < spec.devices_per_node:
                return driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None
            told = types.SimpleNamespace(bytes=uuid_of(int(device)).bytes)
            return driver.CUresult.CUDA_SUCCESS, told

        driver.cuDeviceGetUuid = get_uuid

    Watcher({"cuda.bindings.runtime": serve_runtime, "cuda.bindings.driver": serve_driver}).begin()
