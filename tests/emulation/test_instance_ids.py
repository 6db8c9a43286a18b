"""Which messages of a pair meet: those of one tag, where the backend looks at tags."""

from __future__ import annotations

import pytest

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.instance_ids import InstanceIds, peer_of
from prismscale.graph.node import CollectiveOp


def message(op: CollectiveOp, tag: int, backend: str = "gloo") -> Collective:
    """From rank 0 of three to rank 2, as its end of ``op`` sees it."""
    own, peer = (0, 2) if op is CollectiveOp.SEND else (2, 0)
    group = GroupHandle(group_index=0, ranks=(0, 1, 2), group_rank=own, name="", backend=backend)
    return Collective(op=op, group=group, inputs=(), outputs=(), n_bytes=4, root=peer, tag=tag)


def names(op: CollectiveOp, tags: list[int], backend: str = "gloo") -> list[str]:
    """Of messages in this order."""
    ids = InstanceIds()
    ids.group_created((0, 1, 2), "", backend, 0)
    return [ids.name(message(op, tag, backend)) for tag in tags]


def test_messages_with_other_tags_overtake_each_other() -> None:
    """Sent as 7, 9, 7 and received as 9, 7, 7."""
    sent, taken = names(CollectiveOp.SEND, [7, 9, 7]), names(CollectiveOp.RECV, [9, 7, 7])
    assert [sent[1], sent[0], sent[2]] == taken


def test_nccl_looks_at_no_tags() -> None:
    """Its messages meet in order."""
    sent = names(CollectiveOp.SEND, [7, 9], "nccl")
    assert sent == names(CollectiveOp.RECV, [9, 7], "nccl")


@pytest.mark.parametrize(("tag", "peers"), [(0, (2, 1)), (5, (17, 16))])
def test_a_trace_tells_tags_by_the_peer(tag: int, peers: tuple[int, int]) -> None:
    """The offset of the other end, and the group's size for each tag."""
    ends = CollectiveOp.SEND, CollectiveOp.RECV
    assert tuple(peer_of(message(op, tag)) for op in ends) == peers
