"""torch's async tensor parallelism on symmetric memory of members that are absent."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

from prismscale.devices.null import symmetric_memory
from prismscale.graph.node import CollectiveOp
from support import op_log
from support.emulation import RecordingHook, emulated

RANK, WORLD, NODE = 3, 16, 8
MIB = 2**20


@pytest.fixture(scope="module")
def held() -> list[int]:
    """By how many bytes symmetric memory grew; torch's module is changed once in a process."""
    changes: list[int] = []
    symmetric_memory.install(NODE, changes.append)
    return changes


@pytest.fixture
def hook(held: list[int]) -> Iterator[RecordingHook]:
    """Of rank 3 in two nodes of eight."""
    with emulated(RANK, WORLD, "nccl") as hook:
        yield hook
        symm_mem._group_name_to_workspace_tensor.clear()
        symm_mem._group_name_to_store.clear()


def tensor_parallel() -> str:
    """The name of the group of the first four ranks."""
    groups = [dist.new_group(range(i, i + 4)) for i in range(0, WORLD, 4)]
    return groups[0].group_name


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Of the null device."""
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")


def recorded(run: Callable[[], object]) -> list[op_log.OpRecord]:
    """What ``run`` launches."""
    return list(op_log.ops_of(run))


def channels(hook: RecordingHook) -> list[int]:
    """Of the barriers, in order."""
    barriers = [c for c in hook.collectives if c.op is CollectiveOp.SYMM_MEM_BARRIER]
    return [barrier.tag for barrier in barriers]


def test_a_product_gathers_its_factor_from_peers(hook: RecordingHook) -> None:
    """A chunk from each of three; barriers before, when chunks are there, and after."""
    group, chunk, factor = tensor_parallel(), matrix(256, 128), matrix(128, 512)
    outs: list[torch.Tensor] = []

    def run() -> None:
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(chunk, [factor], 0, group)
        outs.extend([gathered, *products])

    ops = recorded(run)
    assert [tuple(out.shape) for out in outs] == [(1024, 128), (1024, 512)]
    copies = [op.signature for op in ops if op.signature.name == "aten::copy_"]
    from_peers = [copy.inputs[1].shape for copy in copies if copy.inputs[1].on_peer]
    assert from_peers == [(256, 128)] * 3
    assert channels(hook) == [0, 1, 0]


def test_a_product_is_scattered_to_peers(hook: RecordingHook) -> None:
    """Two barriers around each of three chunks, on the two channels in turn."""
    group, left, right = tensor_parallel(), matrix(1024, 128), matrix(128, 512)
    out = torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, "sum", 0, group)
    assert out.shape == (256, 512)
    assert channels(hook) == [0, 1, 1, 0, 0, 1, 1, 0]


def test_chunks_of_a_product_take_turns(hook: RecordingHook) -> None:
    """Although they are issued on two streams: each fills the GPU."""
    group, chunk, factor = tensor_parallel(), matrix(256, 128), matrix(128, 512)
    op_log.set_cost_model(lambda call: (50_000 if "mm" in call.name else 1_000, 10))
    ops = recorded(lambda: torch.ops.symm_mem.fused_all_gather_matmul(chunk, [factor], 0, group))
    products = sorted(
        (op.start_ns, op.stream) for op in ops if op.signature.name.startswith("aten::mm")
    )
    assert len({stream for _, stream in products}) == 2
    starts = [start for start, _ in products]
    assert all(later - before >= 50_000 for before, later in pairwise(starts))


def test_members_beyond_the_node_are_refused(hook: RecordingHook) -> None:
    """No GPU maps their memory."""
    with pytest.raises(RuntimeError, match="2 nodes or NVLink domains of 8"):
        symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, 1024)


def test_memory_is_taken_outside_the_allocator(hook: RecordingHook, held: list[int]) -> None:
    """In whole pieces of 2 MiB, with the words for signals, and given back."""
    group = tensor_parallel()
    before, allocated = len(held), torch.cuda.memory_allocated()
    tensor = symm_mem.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    handle = symm_mem.rendezvous(tensor, group)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (RANK, 4, 4 * MIB)
    assert torch.cuda.memory_allocated() == allocated
    del tensor, handle
    symm_mem.rendezvous(torch.empty(1, device="cuda"), group)
    gc.collect()
    assert held[before:] == [6 * MIB, -6 * MIB]


def test_only_symmetric_tensors_meet(hook: RecordingHook) -> None:
    """torch asks, and takes another way for others; buffers end where the memory ends."""
    group = tensor_parallel()
    assert symm_mem.rendezvous(torch.empty(8, device="cuda"), group) is None
    handle = symm_mem.get_symm_mem_workspace(group, 1024)
    assert handle.get_buffer(0, (512,), torch.bfloat16).shape == (512,)
    with pytest.raises(RuntimeError, match="no room"):
        handle.get_buffer(0, (513,), torch.bfloat16)
