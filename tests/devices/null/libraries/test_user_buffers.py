"""Transformer Engine's user buffers: which communication runs beside which parts of a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

from prismscale.devices.null.libraries.transformer_engine import make_extension
from prismscale.devices.null.libraries.transformer_engine.enums import CommOverlapType
from prismscale.graph.node import CollectiveOp
from support import op_log
from support.emulation import RecordingHook, emulated
from support.te_products import gemm

RANK, WORLD, TENSOR = 5, 16, 4
TOKENS, HIDDEN, WIDE = 1024, 256, 512
MIB = 2**20
BF16 = torch.bfloat16
AG, RS = CommOverlapType["AG"], CommOverlapType["RS"]
tex: Any = make_extension()


@pytest.fixture
def hook(held: list[int]) -> Iterator[RecordingHook]:
    """Of rank 5 of 16, in groups of four that have a communicator of NCCL."""
    with emulated(RANK, WORLD, "nccl") as hook:
        for first in range(0, WORLD, TENSOR):
            dist.new_group(range(first, first + TENSOR), group_desc="tp")
        yield hook
        symm_mem._group_name_to_workspace_tensor.clear()
        symm_mem._group_name_to_store.clear()


def helper() -> Any:
    """With groups made for the start, between hosts."""
    groups = [
        dist.new_group(range(first, first + TENSOR), backend="gloo")
        for first in range(0, WORLD, TENSOR)
    ]
    return tex.CommOverlapHelper(dist.group.WORLD, groups[RANK // TENSOR])


def pipelined(dtype: torch.dtype = BF16) -> Any:
    """Chunks of a product, each reduced as it comes."""
    return tex.CommOverlap([TOKENS, HIDDEN], dtype, helper(), TENSOR, num_splits=4, num_comm_sm=16)


def ring(how: Any = AG) -> Any:
    """Chunks that go around."""
    return tex.CommOverlapP2P([TOKENS, HIDDEN], BF16, helper(), TENSOR, how, num_comm_sm=1)


def product(rows: int = TOKENS, wide: int = HIDDEN, **given: Any) -> list[Any]:
    """Tokens times a weight."""
    weight, tokens = _empty(wide, HIDDEN), _empty(rows, HIDDEN)
    return gemm(weight, True, tokens, False, **given)


def _empty(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=BF16, device="cuda")


def extents(run: Callable[[], object]) -> list[tuple[int, ...]]:
    """Of the products that ``run`` launches: batch, M, N, K."""
    return [
        op.signature.arguments["extents"]
        for op in op_log.ops_of(run)
        if "generic_gemm" in op.signature.name
    ]


def communicated(hook: RecordingHook) -> list[tuple[CollectiveOp, str, int]]:
    """Operations, groups and bytes."""
    return [(c.op, c.group.name, c.n_bytes) for c in hook.collectives]


def test_what_is_gathered_goes_around_while_all_chunks_but_the_last_are_multiplied(
    hook: RecordingHook,
) -> None:
    """By the program's own communicator, in the background of the chunks."""
    buffer = ring()
    found = extents(lambda: product(wide=WIDE, comm_overlap=buffer, comm_type=AG))
    assert found == [(1, TOKENS // TENSOR, WIDE, HIDDEN)] * TENSOR
    assert communicated(hook) == [(CollectiveOp.ALL_GATHER, "tp", TOKENS * HIDDEN * 2)]
    assert hook.n_issued_at_wait == [1]


def test_chunks_of_the_output_are_reduced_as_they_come(hook: RecordingHook) -> None:
    """Of the weight's columns; each member gets its rows."""
    buffer, mine = pipelined(), _empty(TOKENS // TENSOR, HIDDEN)
    out = buffer.get_buffer()
    given = {"out": out, "comm_overlap": buffer, "comm_type": RS, "extra_output": mine}
    found = extents(lambda: product(**given))
    assert found == [(1, TOKENS, HIDDEN // 4, HIDDEN)] * 4
    quarter = (CollectiveOp.REDUCE_SCATTER, "tp", TOKENS * HIDDEN * 2 // 4)
    assert communicated(hook) == [quarter] * 4
    assert hook.n_issued_at_wait == [4] * 4


def test_rows_are_sent_to_their_members_as_they_come(hook: RecordingHook) -> None:
    """All but this rank's own."""
    buffer, mine = ring(RS), _empty(TOKENS // TENSOR, HIDDEN)
    given = {"out": buffer.get_buffer(), "comm_overlap": buffer, "comm_type": RS}
    found = extents(lambda: product(**given, extra_output=mine))
    assert found == [(1, TOKENS // TENSOR, HIDDEN, HIDDEN)] * TENSOR
    rows = (CollectiveOp.REDUCE_SCATTER, "tp", TOKENS * HIDDEN * 2 // TENSOR)
    assert communicated(hook) == [rows] * (TENSOR - 1)


@pytest.mark.parametrize(
    ("how", "op"), [(AG, CollectiveOp.ALL_GATHER), (RS, CollectiveOp.REDUCE_SCATTER)]
)
def test_in_bulk_the_product_stays_whole(hook: RecordingHook, how: Any, op: CollectiveOp) -> None:
    """It has nothing to do with what is communicated."""
    given = {"comm_overlap": pipelined(), "comm_type": how, "bulk_overlap": True}
    assert extents(lambda: product(**given)) == [(1, TOKENS, HIDDEN, HIDDEN)]
    assert communicated(hook) == [(op, "tp", TOKENS * HIDDEN * 2)]


def test_buffers_lie_outside_torchs_allocator(hook: RecordingHook, held: list[int]) -> None:
    """Those that receive rows, too."""
    before, allocated = len(held), torch.cuda.memory_allocated()
    buffers = pipelined(), ring(RS)
    assert torch.cuda.memory_allocated() == allocated
    assert len(held[before:]) == 3
    assert all(n_bytes > 0 for n_bytes in held[before:])
    del buffers


def test_what_does_not_fit_a_buffer_is_refused(hook: RecordingHook) -> None:
    """By elements and by extents; a chunk has this rank's rows."""
    buffer = pipelined(torch.uint8)
    assert buffer.is_fp8_ubuf()
    assert buffer.get_buffer(local_chunk=True).shape == (TOKENS // TENSOR, HIDDEN)
    buffer.copy_into_buffer(
        torch.empty(TOKENS // TENSOR, HIDDEN, dtype=torch.uint8, device="cuda"), local_chunk=True
    )
    with pytest.raises(RuntimeError, match="not compatible"):
        buffer.copy_into_buffer(_empty(TOKENS, HIDDEN))
    with pytest.raises(RuntimeError, match="requested shape"):
        buffer.get_buffer(shape=(TOKENS, HIDDEN + 1))


def test_buffers_of_cublasmp_are_refused(hook: RecordingHook) -> None:
    """Its kernels communicate; buffers without it say so."""
    assert not ring().with_cublasmp()
    with pytest.raises(NotImplementedError, match="with_cublasmp=False"):
        tex.CommOverlapP2P([TOKENS, HIDDEN], BF16, helper(), TENSOR, AG, use_cublasmp=True)


def test_a_gather_beside_another_product_runs_on_its_streams(hook: RecordingHook) -> None:
    """And this stream waits for it."""
    buffer = pipelined()
    tex.bulk_overlap_ag_with_external_gemm(buffer, *ring().get_communication_stream())
    assert communicated(hook) == [(CollectiveOp.ALL_GATHER, "tp", TOKENS * HIDDEN * 2)]
