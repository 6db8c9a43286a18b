"""``cuda.bindings``, CUDA's own Python interface: which GPU is current, and its UUID.

Programs ask it where a GPU is in the node, to stay on the processor beside it. The package itself
is the program's; of its functions those that need a driver to answer are replaced here. What is
not here answers as without a GPU, by its error code.
"""

from __future__ import annotations

import types
import uuid
from typing import Any

import torch

from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.gpus import NullDeviceSpec

NODE = uuid.UUID("6e756c6c-6465-7669-6365-000000000000")
"""UUID of a node's first GPU; the others count on."""


def uuid_of(index: int) -> uuid.UUID:
    """UUID of the GPU ``index`` of the node."""
    return uuid.UUID(int=NODE.int + index)


def index_of(text: str) -> int:
    """Which GPU has the UUID ``text``, with or without ``GPU-`` before it.

    Raises:
        ValueError: ``text`` is no UUID.
    """
    return uuid.UUID(text.removeprefix("GPU-")).int - NODE.int


def install(spec: NullDeviceSpec) -> None:
    """Answer for the null node, whether the package is imported yet or not."""

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
