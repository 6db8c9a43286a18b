"""``pynvml`` tells of the null node."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from prismscale.devices.null.runtime import active


@pytest.fixture
def pynvml() -> Any:
    """As a program imports it."""
    return importlib.import_module("pynvml")


def test_devices_are_those_of_the_node(pynvml: Any) -> None:
    """Their number, name, capability; another index is refused as NVML refuses it."""
    pynvml.nvmlInit()
    spec = active().spec
    assert pynvml.nvmlDeviceGetCount() == torch.cuda.device_count() == spec.devices_per_node
    device = pynvml.nvmlDeviceGetHandleByIndex(3)
    assert pynvml.nvmlDeviceGetIndex(device) == 3
    assert pynvml.nvmlDeviceGetName(device) == torch.cuda.get_device_name()
    assert pynvml.nvmlDeviceGetCudaComputeCapability(device) == torch.cuda.get_device_capability()
    with pytest.raises(pynvml.NVMLError, match="8 devices"):
        pynvml.nvmlDeviceGetHandleByIndex(8)


def test_memory_is_what_the_program_holds(pynvml: Any) -> None:
    """Used grows with reserved memory."""
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    torch.cuda.empty_cache()
    before = pynvml.nvmlDeviceGetMemoryInfo(device)
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    after = pynvml.nvmlDeviceGetMemoryInfo(device)
    assert after.used - before.used == held.nbytes
    assert after.used + after.free == after.total == torch.cuda.mem_get_info()[1]


def test_devices_of_a_node_are_joined_by_nvlink(pynvml: Any) -> None:
    """DeepEP looks at each pair before it makes a buffer."""
    first, last = pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.nvmlDeviceGetHandleByIndex(7)
    status = pynvml.nvmlDeviceGetP2PStatus(first, last, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    assert status == pynvml.NVML_P2P_STATUS_OK


def test_torch_asks_it(pynvml: Any) -> None:
    """``torch.cuda``'s own figures of a running chip are its constants."""
    assert torch.cuda.utilization() == 100
    assert torch.cuda.temperature() == 60
    assert torch.cuda.power_draw() > 0


def test_what_is_not_known_raises_as_nvml_does(pynvml: Any) -> None:
    """Programs catch NVMLError of what a board does not support."""
    with pytest.raises(pynvml.NVMLError, match="Not Supported"):
        pynvml.nvmlDeviceGetFanSpeed(pynvml.nvmlDeviceGetHandleByIndex(0))
    with pytest.raises(AttributeError):
        pynvml.NO_SUCH_CONSTANT  # noqa: B018
