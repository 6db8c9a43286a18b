"""``cuda.bindings`` tells of the null node."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prismscale.devices.null import cuda_bindings
from prismscale.devices.null.runtime import active

RUNTIME = """
import enum
class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInsufficientDriver = 35
def cudaGetDevice():
    return cudaError_t.cudaErrorInsufficientDriver, None
"""
DRIVER = """
import enum
class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_DEVICE = 101
def cuDeviceGetUuid(device):
    raise RuntimeError('no libcuda')
"""


@pytest.fixture
def bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A package with the names of NVIDIA's, which is no requirement; as a program imports it."""
    for name, text in (("runtime", RUNTIME), ("driver", DRIVER)):
        path = tmp_path / "cuda" / "bindings" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "cuda"}
    cuda_bindings.install(active().spec)
    yield tuple(importlib.import_module(f"cuda.bindings.{n}") for n in ("runtime", "driver"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        del sys.modules[name]
    sys.modules.update(own)


def test_a_gpu_is_found_by_its_uuid(bindings: tuple[Any, Any]) -> None:
    """As Megatron-LM looks for the processor beside a GPU."""
    runtime, driver = bindings
    pynvml: Any = importlib.import_module("pynvml")
    with torch.cuda.device(3):
        error, index = runtime.cudaGetDevice()
    assert error == runtime.cudaError_t.cudaSuccess
    error, told = driver.cuDeviceGetUuid(index)
    assert error == driver.CUresult.CUDA_SUCCESS
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=told.bytes)}")
    assert pynvml.nvmlDeviceGetIndex(handle) == 3
    assert pynvml.nvmlDeviceGetUUID(handle).endswith(str(uuid.UUID(bytes=told.bytes)))


def test_a_gpu_that_the_node_lacks_is_refused(bindings: tuple[Any, Any]) -> None:
    """By CUDA's own code, and by NVML's error."""
    _, driver = bindings
    pynvml: Any = importlib.import_module("pynvml")
    assert driver.cuDeviceGetUuid(8)[0] == driver.CUresult.CUDA_ERROR_INVALID_DEVICE
    for text in (f"GPU-{cuda_bindings.uuid_of(8)}", "GPU-x"):
        with pytest.raises(pynvml.NVMLError, match="Invalid Argument"):
            pynvml.nvmlDeviceGetHandleByUUID(text)
