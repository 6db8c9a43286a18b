"""Schedules: what one member of a group sends and receives in a communication, by message.

The schedules are gloo's, derived from the bytes that it moves (``bench/pruned_transfers.py`` counts
them): rings for reductions and gathers, a binomial tree for a broadcast, and one message to each
member where data differ by member. gloo's reduce-scatter is an all-reduce of which each member
keeps its part. As an alternative to the ring there is a tree for all-reduces, as NCCL uses for
small tensors.

A message holds *parts* of a flat buffer. During a reduction these are partial sums, to which the
receiver adds its own data. Otherwise they are values of the receiver's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from prismscale.graph.node import CollectiveOp

MOST_MESSAGES = 64
"""Messages per member and pass around a ring. In larger groups, chunks travel together."""


class Algorithm(Enum):
    """Algorithm of all-reduces. All other operations use gloo's algorithm."""

    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The properties of a communication that determine its messages. Sizes are in elements."""

    op: CollectiveOp
    size: int
    """Members of the group."""
    numel: int
    """Elements of the flat buffer that is reduced, broadcast, gathered by all or sent."""
    root: int = -1
    """Group rank of the root, or of the peer of a send or receive."""
    send_splits: tuple[int, ...] = ()
    """For an all-to-all or scatter: elements that this member sends to each."""
    receive_splits: tuple[int, ...] = ()
    """For an all-to-all or gather: elements that it receives from each."""
    algorithm: Algorithm = Algorithm.RING


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPart:
    """A range of the flat buffer.

    ``owner`` is the member whose sum becomes the result, or -1 where the message holds the result.
    """

    start: int
    stop: int
    owner: int = -1

    @property
    def is_partial(self) -> bool:
        """Whether it is a partial sum, to which the receiver adds its own data."""
        return self.owner >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """One message from one member to another."""

    peer: int
    """Group rank of the other end."""
    parts: tuple[BufferPart, ...]

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(part.stop - part.start for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """An outgoing and an incoming message. ``in_turn``: sent data depend on received data."""

    send: Packet | None = None
    receive: Packet | None = None
    in_turn: bool = False


def rounds(shape: Shape, member: int, *, is_pruned: bool = True) -> Iterator[Round]:
    """Yield the rounds of one member, in order and without empty messages.

    ``is_pruned`` says that some member is absent. Only then may chunks travel together, because an
    assistant sends without having received. In a complete ring all members would wait for each
    other.
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
    """Return begin and end of a member's chunk of the flat buffer."""
    return shape.numel * index // shape.size, shape.numel * (index + 1) // shape.size


def _ring(shape: Shape, member: int, is_pruned: bool, *, reduces: bool) -> Iterator[Round]:
    """Yield ``size - 1`` steps: a chunk goes to the right, the next one comes from the left."""
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
    """Yield the end of a reduce: each member sends its summed chunk to the root."""
    if member != shape.root:
        start, stop = chunk(shape, member)
        yield Round(send=Packet(peer=shape.root, parts=(BufferPart(start=start, stop=stop),)))
        return
    for peer in range(shape.size):
        if peer != member:
            start, stop = chunk(shape, peer)
            yield Round(receive=Packet(peer=peer, parts=(BufferPart(start=start, stop=stop),)))


def tree_parent(member: int) -> int:
    """Return the parent in the tree of an all-reduce. Member 0 is the root; its parent is -1."""
    return (member - 1) // 2 if member else -1


def tree_children(member: int, size: int) -> list[int]:
    """Return the children in the tree of an all-reduce, at most two."""
    return [c for c in (2 * member + 1, 2 * member + 2) if c < size]


def _tree_reduction(shape: Shape, member: int) -> Iterator[Round]:
    """Yield a tree all-reduce: partial sums go up to the root, the result comes down."""
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
    """Yield the rounds of gloo's binomial tree.

    In round ``i`` the first ``2 ** i`` members, counted from the root, have the data. Each sends it
    to the member ``2 ** i`` places on.
    """
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
    """Yield one message per peer: all-to-all in gloo's order, gather, scatter, send, recv."""
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
    """Return consecutive buffer parts of the given lengths."""
    ends = list(accumulate(splits))
    return [BufferPart(start=end - n, stop=end) for n, end in zip(splits, ends, strict=True)]


def sent_numel(shape: Shape, member: int) -> int:
    """Return the number of elements that a member sends."""
    return sum(r.send.numel for r in rounds(shape, member) if r.send)


def received_numel(shape: Shape, member: int) -> int:
    """Return the number of elements that a member receives."""
    return sum(r.receive.numel for r in rounds(shape, member) if r.receive)
