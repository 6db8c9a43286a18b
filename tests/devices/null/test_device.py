"""torch.cuda as programs see it on the null device."""

from __future__ import annotations

import os

import pytest
import torch

from prismscale.torch_versions import installed_cudnn


def test_tensors_on_cuda_are_plain_tensors() -> None:
    """A CUDA tensor is exactly torch.Tensor, on cuda:0."""
    tensor = torch.ones(2, 3, device="cuda")

    assert type(tensor) is torch.Tensor
    assert str(tensor.device) == "cuda:0"


def test_properties_are_those_of_the_chosen_gpu() -> None:
    """Name, capability and memory come from the preset."""
    properties = torch.cuda.get_device_properties(0)

    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability() == (9, 0)
    assert properties.multi_processor_count == 132
    # Twice a cycle: 3.35 TB/s.
    bandwidth = 2 * properties.memory_clock_rate * 1000 * properties.memory_bus_width / 8
    assert bandwidth == pytest.approx(3.35e12, rel=0.01)
    assert torch.cuda.is_bf16_supported()


def test_a_node_has_eight_devices() -> None:
    """set_device moves allocations; an ordinal beyond the node is refused."""
    try:
        torch.cuda.set_device(3)
        assert torch.cuda.device_count() == 8
        assert torch.empty(1, device="cuda").get_device() == 3
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(8)
    finally:
        torch.cuda.set_device(0)


def test_devices_of_a_node_have_uuids_and_addresses_of_their_own() -> None:
    """Programs map ranks to GPUs by them."""
    found = [torch.cuda.get_device_properties(index) for index in range(8)]

    assert len({str(p.uuid) for p in found}) == len({p.pci_bus_id for p in found}) == 8


def test_cpu_tensors_stay_real() -> None:
    """CPU arithmetic is what it always was."""
    assert torch.arange(4).square().sum().item() == 14


def test_mixing_devices_is_an_error() -> None:
    """A CPU tensor with dimensions in a CUDA op is refused, as on a real GPU."""
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_events_measure_logical_time() -> None:
    """Elapsed time is positive, and grows with the work between two events."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    tensor = torch.ones(1000, device="cuda")
    start.record()
    for _ in range(10):
        tensor.add_(1)
    middle.record()
    for _ in range(20):
        tensor.add_(1)
    end.record()
    torch.cuda.synchronize()

    assert start.elapsed_time(middle) > 0
    assert middle.elapsed_time(end) == pytest.approx(2 * start.elapsed_time(middle), rel=0.2)


def test_a_stream_waits_for_another() -> None:
    """wait_stream puts later work of one stream behind the other's."""
    side = torch.cuda.Stream()
    tensor = torch.ones(1000, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(100):
            tensor.add_(1)
        done = side.record_event(torch.cuda.Event(enable_timing=True))
    torch.cuda.current_stream().wait_stream(side)
    after = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
    torch.cuda.synchronize()

    assert done.elapsed_time(after) >= 0
    assert side.cuda_stream != torch.cuda.current_stream().cuda_stream == 0


def test_rng_state_is_sixteen_bytes() -> None:
    """Seed and offset round-trip, as DTensor's RNG tracker needs."""
    torch.cuda.manual_seed(1234)
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(5)
    torch.cuda.set_rng_state(state)

    assert state.numel() == 16
    assert torch.cuda.initial_seed() == 1234


def test_generators_live_on_cuda() -> None:
    """torch.Generator("cuda") seeds and feeds random ops."""
    generator = torch.Generator(device="cuda").manual_seed(7)

    assert generator.device.type == "cuda"
    assert torch.rand(3, device="cuda", generator=generator).shape == (3,)


def test_pinned_memory_is_plain_memory_that_says_so() -> None:
    """pin_memory keeps the values and answers is_pinned."""
    pinned = torch.arange(5).pin_memory()

    assert pinned.is_pinned()
    assert pinned.tolist() == [0, 1, 2, 3, 4]
    assert not torch.arange(5).is_pinned()


def test_pinned_memory_may_be_larger_than_the_machines() -> None:
    """A cluster's hosts have more: what is not written takes none, and is blank."""
    pages = os.sysconf("SC_PHYS_PAGES")
    pinned = torch.empty(2 * pages * os.sysconf("SC_PAGE_SIZE"), dtype=torch.uint8, pin_memory=True)
    pinned[-1] = 3

    assert pinned.is_pinned()
    assert (pinned[0].item(), pinned[-1].item()) == (0, 3)
    pinned[: 1 << 22].copy_(torch.ones(1 << 22, dtype=torch.uint8, device="cuda"))
    del pinned


def test_a_pinning_data_loader_works() -> None:
    """DataLoader(pin_memory=True) delivers real values in pinned tensors."""
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, pin_memory=True)
    batches = [batch.cuda(non_blocking=True) for (batch,) in loader]

    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_storage_resize_moves_memory() -> None:
    """UntypedStorage.resize_ frees and takes device memory, as FSDP needs."""
    tensor = torch.empty(1 << 20, device="cuda")
    before = torch.cuda.memory_allocated()
    tensor.untyped_storage().resize_(0)
    freed = before - torch.cuda.memory_allocated()
    tensor.untyped_storage().resize_(4 << 20)

    assert freed == 4 << 20
    assert torch.cuda.memory_allocated() == before


def test_accelerator_api_agrees() -> None:
    """torch.accelerator sees the same device and memory."""
    assert str(torch.accelerator.current_accelerator()) == "cuda"
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()


def test_a_cuda_build_tells_the_version_of_its_cudnn() -> None:
    """Programs choose kernels by it; a CPU build has none."""
    told = torch.backends.cudnn.version()

    assert told == (installed_cudnn() if torch.backends.cudnn._cudnn is not None else None)
