"""What one member of a group sends and receives in a communication, message by message.

The schedules are gloo's, read off what it moves (``bench/pruned_transfers.py`` counts it): rings
for reductions and gathers, a binomial tree for a broadcast, one message to each for what differs by
member. A reduce-scatter of gloo's is an all-reduce of which each member keeps its part. A tree of
all-reduces, as NCCL makes for small tensors, is there beside the ring.

A message holds *parts* of a flat buffer. Of a reduction that is on its way it holds partial sums,
to each of which the receiver adds its own; otherwise it holds what the receiver ends with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from prismscale.graph.node import CollectiveOp

MOST_MESSAGES = 64
"""Of a pass around a ring, by each member: in larger groups several chunks travel together."""


class Algorithm(Enum):
    """How all-reduces are made. Everything else is made as gloo makes it."""

    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A communication, as far as its messages depend on it. Sizes are in elements."""

    op: CollectiveOp
    size: int
    """Members of the group."""
    numel: int
    """Of the flat buffer: what is reduced, broadcast, gathered by all or sent."""
    root: int = -1
    """Group rank of the root, or of the peer of a send or receive."""
    send_splits: tuple[int, ...] = ()
    """Of an all-to-all or scatter: what this member gives to each."""
    receive_splits: tuple[int, ...] = ()
    """Of an all-to-all or gather: what it gets from each."""
    algorithm: Algorithm = Algorithm.RING


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPart:
    """A range of the flat buffer. ``owner``: the member whose sum becomes the result; -1 where the
    message holds the result."""

    start: int
    stop: int
    owner: int = -1

    @property
    def is_partial(self) -> bool:
        """The receiver adds its own."""
        return self.owner >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """What goes from one member to another at a time."""

    peer: int
    """Group rank of the other end."""
    parts: tuple[BufferPart, ...]

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(part.stop - part.start for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A message out and one in. ``in_turn``: what is sent depends on what is received."""

    send: Packet | None = None
    receive: Packet | None = None
    in_turn: bool = False


def rounds(shape: Shape, member: int, *, is_pruned: bool = True) -> Iterator[Round]:
    """The rounds of one member, in order; none holds an empty message.

    ``is_pruned``: somebody is absent. Chunks may travel together then, since an assistant sends
    without having received; in a ring whose members all wait for each other they may not.
    """
    for found in _rounds(shape, member, is_pruned):
        send = found.send if found.send and found.send.numel else None
        receive = found.receive if found.receive and found.receive.numel else None
        if send or receive:
            yield Round(send=send, receive=receive, in_turn=found.in_turn)


def _rounds(shape: Shape, member: int, is_pruned: bool) -> Iterator[Round]:
    op = shape.op
    if op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER):
        if shape.algorithm is Algorithm.TREE:
            yield from _tree_reduction(shape, member)
        else:
            yield from _ring(shape, member, is_pruned, reduces=True)
            yield from _ring(shape, member, is_pruned, reduces=False)
    elif op is CollectiveOp.REDUCE:
        yield from _ring(shape, member, is_pruned, reduces=True)
        yield from _chunks_to_root(shape, member)
    elif op is CollectiveOp.ALL_GATHER:
        yield from _ring(shape, member, is_pruned, reduces=False)
    elif op is CollectiveOp.BROADCAST:
        yield from _broadcast(shape, member)
    else:
        yield from _direct(shape, member)


def chunk(shape: Shape, index: int) -> tuple[int, int]:
    """Where a member's chunk of the flat buffer begins and ends."""
    return shape.numel * index // shape.size, shape.numel * (index + 1) // shape.size


def _ring(shape: Shape, member: int, is_pruned: bool, *, reduces: bool) -> Iterator[Round]:
    """Step ``s`` of ``size - 1``: a chunk goes on to the right, the next comes from the left."""
    size = shape.size
    first = member - 1 if reduces else member
    steps = -(-(size - 1) // MOST_MESSAGES) if is_pruned and size > 1 else 1

    def message(peer: int, newest: int, count: int) -> Packet:
        chunks = [(newest - k) % size for k in range(count)]
        return Packet(
            peer=peer % size,
            parts=tuple(
                BufferPart(start=start, stop=stop, owner=c if reduces else -1)
                for c in chunks
                for start, stop in (chunk(shape, c),)
            ),
        )

    for s in range(0, size - 1, steps):
        count = min(steps, size - 1 - s)
        yield Round(
            send=message(member + 1, first - s, count),
            receive=message(member - 1, first - 1 - s, count),
            in_turn=steps > 1,
        )


def _chunks_to_root(shape: Shape, member: int) -> Iterator[Round]:
    """The end of a reduce: each member has summed up its chunk, and the root takes all."""
    if member != shape.root:
        start, stop = chunk(shape, member)
        yield Round(send=Packet(peer=shape.root, parts=(BufferPart(start=start, stop=stop),)))
        return
    for peer in range(shape.size):
        if peer != member:
            start, stop = chunk(shape, peer)
            yield Round(receive=Packet(peer=peer, parts=(BufferPart(start=start, stop=stop),)))


def tree_parent(member: int) -> int:
    """In the tree of an all-reduce, whose root is member 0; -1 of the root."""
    return (member - 1) // 2 if member else -1


def tree_children(member: int, size: int) -> list[int]:
    """In the tree of an all-reduce: at most two."""
    return [c for c in (2 * member + 1, 2 * member + 2) if c < size]


def _tree_reduction(shape: Shape, member: int) -> Iterator[Round]:
    """Sums up to the root, the result down."""
    partial = (BufferPart(start=0, stop=shape.numel, owner=0),)
    result = (BufferPart(start=0, stop=shape.numel),)
    parent, children = tree_parent(member), tree_children(member, shape.size)
    for child in children:
        yield Round(receive=Packet(peer=child, parts=partial))
    if parent >= 0:
        yield Round(send=Packet(peer=parent, parts=partial))
        yield Round(receive=Packet(peer=parent, parts=result))
    for child in children:
        yield Round(send=Packet(peer=child, parts=result))


def _broadcast(shape: Shape, member: int) -> Iterator[Round]:
    """gloo's binomial tree: in round ``i`` those below ``2 ** i``, counted from the root, have it
    and send it as far on."""
    size, root = shape.size, shape.root
    place = (member - root) % size
    whole = (BufferPart(start=0, stop=shape.numel),)
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            yield Round(send=Packet(peer=(place + distance + root) % size, parts=whole))
        elif distance <= place < 2 * distance:
            yield Round(receive=Packet(peer=(place - distance + root) % size, parts=whole))
        distance *= 2


def _direct(shape: Shape, member: int) -> Iterator[Round]:
    """One message to, and from, each: all-to-all in gloo's order, gather, scatter, send, recv."""
    given, got = _ranges(shape.send_splits), _ranges(shape.receive_splits)
    if shape.op is CollectiveOp.SEND:
        yield Round(send=Packet(peer=shape.root, parts=(BufferPart(start=0, stop=shape.numel),)))
    elif shape.op is CollectiveOp.RECV:
        yield Round(receive=Packet(peer=shape.root, parts=(BufferPart(start=0, stop=shape.numel),)))
    elif shape.op in (CollectiveOp.GATHER, CollectiveOp.SCATTER) and member != shape.root:
        whole = Packet(peer=shape.root, parts=(BufferPart(start=0, stop=shape.numel),))
        if shape.op is CollectiveOp.GATHER:
            yield Round(send=whole)
        else:
            yield Round(receive=whole)
    else:
        for i in range(1, shape.size):
            to, source = (member + i) % shape.size, (member - i) % shape.size
            yield Round(
                send=Packet(peer=to, parts=(given[to],)) if given else None,
                receive=Packet(peer=source, parts=(got[source],)) if got else None,
            )


def _ranges(splits: Sequence[int]) -> list[BufferPart]:
    """Consecutive parts of these lengths."""
    ends = list(accumulate(splits))
    return [BufferPart(start=end - n, stop=end) for n, end in zip(splits, ends, strict=True)]


def sent_numel(shape: Shape, member: int) -> int:
    """Elements that a member sends."""
    return sum(r.send.numel for r in rounds(shape, member) if r.send)


def received_numel(shape: Shape, member: int) -> int:
    """Elements that a member receives."""
    return sum(r.receive.numel for r in rounds(shape, member) if r.receive)
