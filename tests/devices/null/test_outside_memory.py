"""Memory that torch's allocator never sees, as a program communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError, Work

from prismscale.cost.nccl.nccl_memory import MIB, NcclSettings
from prismscale.devices.null.memory import memory_stats
from prismscale.devices.null.memory.outside_memory import OutsideMemory
from prismscale.devices.null.runtime import active
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.work import completed
from prismscale.graph.node import CollectiveOp

CONTEXT = 256 * MIB
NODE = GroupHandle(
    group_index=1, ranks=tuple(range(8)), group_rank=0, name="tp", backend="cuda:nccl"
)
SETTINGS = NcclSettings(channels=16, gpus_per_node=8)


class Answers:
    """A hook that counts its batches."""

    def __init__(self) -> None:
        self.batches = 0

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Done at once."""
        self.batches += 1
        return completed(batch[0].outputs)


@pytest.fixture
def library() -> Iterator[object]:
    """The null device's, whose other users find what they left."""
    device = active()
    device.library.ps_set_outside_bytes(0, CONTEXT)
    yield device.library
    device.library.ps_set_outside_bytes(0, device.spec.context_bytes)


def outside_of(library: object, settings: NcclSettings = SETTINGS) -> OutsideMemory:
    """Nothing has communicated yet."""
    return OutsideMemory(library, context_bytes=CONTEXT, settings=settings)  # type: ignore[arg-type]


def call(op: CollectiveOp, *, device: str = "cuda", root: int = -1) -> Collective:
    """One tensor's communication in :data:`NODE`."""
    tensors = (torch.empty(8, device=device),)
    return Collective(
        op=op, group=NODE, inputs=tensors, outputs=tensors, n_bytes=tensors[0].nbytes, root=root
    )


def test_the_first_collective_takes_what_the_gpu_has_free(library: object) -> None:
    """The second one, over the same rings, nothing."""
    outside, answers = outside_of(library), Answers()
    hook = outside.seen_by(answers)
    before = torch.cuda.mem_get_info()[0] - 2 * MIB  # a segment for the tensor, if it is the first
    hook.communicate([call(CollectiveOp.ALL_REDUCE)])
    after = torch.cuda.mem_get_info()[0]
    hook.communicate([call(CollectiveOp.ALL_GATHER)])
    assert before - after <= 2 * 16 * SETTINGS.both_bytes <= before + 2 * MIB - after
    assert torch.cuda.mem_get_info()[0] == after
    assert answers.batches == 2


def test_parts_are_named_by_their_group(library: object) -> None:
    """The largest first."""
    outside = outside_of(library)
    outside.connect([call(CollectiveOp.ALL_TO_ALL)])
    assert [part.name for part in outside.parts()] == ["NCCL tp", "CUDA context"]
    assert outside.parts()[1].n_bytes == CONTEXT


def test_messages_connect_their_own_peer(library: object) -> None:
    """A sender needs less than a receiver; two peers as much again."""
    held = []
    outside = outside_of(library)
    for op, peer in ((CollectiveOp.SEND, 1), (CollectiveOp.RECV, 1), (CollectiveOp.RECV, 2)):
        outside.connect([call(op, root=peer)])
        held.append(sum(part.n_bytes for part in outside.parts()) - CONTEXT)
    sends, receives = held[0], held[1] - held[0]
    assert 0 < sends < receives
    assert held[2] - held[1] == receives


def test_the_hosts_own_tensors_connect_nothing(library: object) -> None:
    """They go through gloo."""
    outside = outside_of(library)
    outside.connect([call(CollectiveOp.ALL_REDUCE, device="cpu")])
    assert [part.name for part in outside.parts()] == ["CUDA context"]


def test_a_librarys_own_exchange_connects_nothing(library: object) -> None:
    """But the program's own, afterwards, does."""
    outside, nothing = outside_of(library), (torch.empty(0, device="cuda"),)
    own = call(CollectiveOp.ALL_TO_ALL)
    outside.connect([replace(own, inputs=nothing, outputs=nothing)])
    assert [part.name for part in outside.parts()] == ["CUDA context"]
    outside.connect([own])
    assert [part.name for part in outside.parts()] == ["NCCL tp", "CUDA context"]


def test_a_gpu_without_room_for_buffers_fails_as_nccl_does(library: Any) -> None:
    """With the group and the sizes; what holds the memory is noted, as where torch runs out."""
    huge = NcclSettings(channels=16, gpus_per_node=8, simple_bytes=64 << 30)
    outside, held = outside_of(library, huge), torch.empty(64 * MIB, device="cuda").byte()
    with pytest.raises(DistBackendError, match=r"all_reduce in 'tp' take \d+ MiB"):
        outside.connect([call(CollectiveOp.ALL_REDUCE)])
    noted = memory_stats.blocks_at_out_of_memory(library, 0)
    assert held.data_ptr() in {block.address for block in noted}
