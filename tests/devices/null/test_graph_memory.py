"""Memory of CUDA graphs: pools of their own, workspaces in them, words of random state."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

from support.cuda_graphs import capture


@pytest.fixture
def empty() -> int:
    """Bytes that are held before; torch has no figures until a program has used the device."""
    torch.cuda.init()
    torch.cuda.set_stream(torch.cuda.default_stream())
    gc.collect()
    torch.cuda.empty_cache()
    return held()


SIZE = 32 << 20


def held() -> int:
    """Reserved for what is large: the words of random state may take a segment of small blocks."""
    return int(torch.cuda.memory_stats()["reserved_bytes.large_pool.current"])


def buffer() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, device="cuda")


def test_memory_of_a_graph_stays_its_own_until_the_graph_and_its_tensors_go(empty: int) -> None:
    """Freed blocks are reused in the capture, and by nobody else."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        address = buffer().data_ptr()
        kept = buffer()
        assert kept.data_ptr() == address
    assert buffer().data_ptr() != address
    torch.cuda.empty_cache()
    assert held() == empty + SIZE
    del graph
    torch.cuda.empty_cache()
    assert held() == empty + SIZE
    del kept
    torch.cuda.empty_cache()
    assert held() == empty


def test_graphs_can_share_a_pool(empty: int) -> None:
    """The second captures into what the first has freed; the pool stays until both are gone."""
    handle = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    first = capture(buffer, pool=handle, stream=stream)
    second = capture(buffer, pool=first.pool(), stream=stream)
    third = capture(buffer, stream=stream)
    assert first.pool() == second.pool() == handle != third.pool()
    assert held() == empty + 2 * SIZE
    del first, third
    torch.cuda.empty_cache()
    assert held() == empty + SIZE
    second.reset()
    torch.cuda.empty_cache()
    assert held() == empty


def test_workspaces_of_a_capture_lie_in_its_pool(empty: int) -> None:
    """Until the program clears them, as for any stream that first multiplies there."""
    matrix = torch.ones(8, 8, device="cuda")
    streams = itertools.islice(iter(torch.cuda.Stream, None), 2)
    graph = capture(lambda: matrix @ matrix, stream=next(streams))
    owners = {s["segment_pool_id"] for s in torch.cuda.memory_snapshot() if s["allocated_size"]}
    assert graph.pool() in owners
    torch._C._cuda_clearCublasWorkspaces()
    owners = {s["segment_pool_id"] for s in torch.cuda.memory_snapshot() if s["allocated_size"]}
    assert graph.pool() not in owners


@pytest.fixture
def reuses(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether captures reuse what other streams are through with."""
    setting = "graph_capture_record_stream_reuse:"
    torch._C._accelerator_setAllocatorSettings(f"{setting}{request.param}")
    yield request.param
    torch._C._accelerator_setAllocatorSettings(f"{setting}False")


@pytest.mark.parametrize("reuses", [False, True], indirect=True)
def test_a_capture_reuses_what_another_stream_used_once_that_is_joined(
    empty: int, *, reuses: bool
) -> None:
    """Only where PYTORCH_ALLOC_CONF asks for it; else such memory waits for the capture's end."""
    side, kept = torch.cuda.Stream(), []

    def run() -> None:
        first = buffer()
        address = first.data_ptr()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first.add_(1)
        first.record_stream(side)
        del first
        kept.append(buffer())
        assert kept[0].data_ptr() != address
        torch.cuda.current_stream().wait_stream(side)
        kept.append(buffer())
        assert (kept[1].data_ptr() == address) == reuses

    graph = capture(run)
    assert held() == empty + (2 if reuses else 3) * SIZE
    del graph


def test_graphs_of_a_device_share_two_words_of_random_state(empty: int) -> None:
    """Seed and offset, in the ordinary pool, until the last graph is gone."""
    tensor = torch.ones(8, device="cuda")
    before = torch.cuda.memory_allocated()
    first = capture(tensor.neg_)
    held = torch.cuda.memory_allocated() - before
    second = capture(tensor.neg_)
    assert torch.cuda.memory_allocated() - before == held == 2 * 512
    first.reset()
    second.reset()
    assert torch.cuda.memory_allocated() == before
