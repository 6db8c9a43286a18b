"""Contributions of live ranks to each other, through files in shared memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.instance_ids import InstanceIds
from prismscale.errors import StorageError, StuckError
from prismscale.graph.node import CollectiveOp
from prismscale.live.exchange import Exchange
from support.calls import RANKS, call


def exchange(folder: Path, rank: int, **options: float) -> Exchange:
    """A live rank's view; ranks 2, 7 and 11 are live."""
    return Exchange(folder=folder, rank=rank, live=frozenset({2, 7, 11}), **options)


def test_peers_are_the_other_live_members(tmp_path: Path) -> None:
    """Rank 11 is live, but not in the group."""
    assert exchange(tmp_path, 2).peers(call(2)) == [7]
    big = GroupHandle(group_index=0, ranks=tuple(range(64)), group_rank=2, name="", backend="gloo")
    wide = Collective(op=CollectiveOp.BARRIER, group=big, inputs=(), outputs=(), n_bytes=0)
    assert exchange(tmp_path, 2).peers(wide) == [7, 11]


@pytest.mark.parametrize(("root", "peers"), [(2, [7]), (1, [])])
def test_the_peer_of_a_message_is_its_other_end(
    tmp_path: Path, root: int, peers: list[int]
) -> None:
    """Group rank 2 is live rank 7; group rank 1 is nobody's business here."""
    assert exchange(tmp_path, 2).peers(call(2, op=CollectiveOp.SEND, root=root)) == peers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_one_offers_the_other_takes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Several tensors of any type, transposed ones too, each flat; no file stays."""
    first, second = torch.arange(6).to(dtype).view(2, 3).t(), torch.ones(4, dtype=dtype)
    exchange(tmp_path, 2).offer("m", call(2, first, second), [7])
    taken = exchange(tmp_path, 7).take("m", 2, call(7, first, second))
    assert torch.equal(taken[0], first.reshape(-1))
    assert torch.equal(taken[1], second)
    assert list(tmp_path.iterdir()) == []


def test_a_coalesced_call_may_mix_types(tmp_path: Path) -> None:
    """Bytes beside floats, and nothing between them."""
    given = (torch.arange(3, dtype=torch.int8), torch.empty(0), torch.tensor([2.0, 3.5]))
    exchange(tmp_path, 2).offer("m", call(2, *given), [7])
    taken = exchange(tmp_path, 7).take("m", 2, call(7, *given))
    assert [t.tolist() for t in taken] == [[0, 1, 2], [], [2.0, 3.5]]


def test_empty_tensors_can_be_exchanged(tmp_path: Path) -> None:
    """As a rank without tokens does."""
    nothing = torch.empty(0)
    exchange(tmp_path, 2).offer("m", call(2, nothing), [7])
    assert exchange(tmp_path, 7).take("m", 2, call(7, nothing))[0].numel() == 0


def test_a_scatters_chunks_come_apart(tmp_path: Path) -> None:
    """The root contributes one chunk for each member."""
    chunks = torch.arange(8.0).chunk(4)
    exchange(tmp_path, 2).offer("m", call(2, *chunks, op=CollectiveOp.SCATTER), [7])
    receiver = call(7, torch.empty(2), op=CollectiveOp.SCATTER)
    receiver.inputs = ()
    taken = exchange(tmp_path, 7).take("m", 2, receiver)
    assert [t.tolist() for t in taken] == [c.tolist() for c in chunks]


def test_only_the_rows_for_a_reader_are_offered_to_it(tmp_path: Path) -> None:
    """Of an uneven all_to_all: rank 7 is the third member, and has fewer rows itself."""
    rows = torch.arange(12.0).view(6, 2)
    sender = call(2, rows, op=CollectiveOp.ALL_TO_ALL)
    sender.input_splits = (1, 0, 3, 2)
    exchange(tmp_path, 2).offer("m", sender, [7])
    receiver = call(7, torch.empty(2, 2), op=CollectiveOp.ALL_TO_ALL)
    taken = exchange(tmp_path, 7).take("m", 2, receiver)
    assert [t.tolist() for t in taken] == [rows[1:4].flatten().tolist()]


def test_a_contribution_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """In communications that the coordinator does not announce."""
    tensor = torch.ones(2)
    writer = threading.Timer(0.05, exchange(tmp_path, 2).offer, ("m", call(2, tensor), [7]))
    writer.start()
    assert torch.equal(exchange(tmp_path, 7).take("m", 2, call(7, tensor))[0], tensor)
    writer.join()


def test_a_contribution_that_never_comes_is_named(tmp_path: Path) -> None:
    """The rank, and the call that it does not make."""
    with pytest.raises(StuckError, match=r"rank 7 waits for live rank 2, .* all_reduce"):
        exchange(tmp_path, 7, patience_s=0.01).take("m", 2, call(7, torch.ones(2)))


def test_full_shared_memory_is_said(tmp_path: Path) -> None:
    """As far as a folder that is not there is like a full one."""
    with pytest.raises(StorageError, match="need shared memory"):
        exchange(tmp_path / "gone", 2).offer("m", call(2, torch.ones(2)), [7])


def names(rank: int, *calls: Collective) -> list[str]:
    """Instances as one rank names them; it belongs to two groups of the same ranks."""
    ids = InstanceIds()
    ids.group_created(RANKS, "", "gloo", 0)
    ids.group_created(RANKS, "", "gloo", 1)
    return [ids.name(c) for c in calls]


def test_meetings_have_the_same_name_on_every_member() -> None:
    """By group and running number; two groups of the same ranks are two."""
    mine = names(2, call(2), call(2, group_index=1), call(2))
    assert mine == names(7, call(7), call(7, group_index=1), call(7))
    assert len(set(mine)) == 3


def test_both_ends_name_a_message_alike() -> None:
    """A message back is another one."""
    send = call(2, op=CollectiveOp.SEND, root=2)
    receive = call(7, op=CollectiveOp.RECV, root=0)
    assert names(2, send) == names(7, receive)
    assert names(2, send) != names(7, call(7, op=CollectiveOp.SEND, root=0))
