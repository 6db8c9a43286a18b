"""What an absent neighbour says to a live member, so that live members end with the right result.

PrismLLM's rules (section on pruned collectives). Of a *ring*: a chunk goes around once and is then
its owner's. If the owner is live, the last absent member before it sends, in place of a partial
sum, what those still lack who come after: ``full`` less the contributions still to be added. What
others send on the way to an absent member is arbitrary. Of a *tree*: the root's live members are
connected to it; one absent child of theirs sends ``full`` less all of their contributions, other
absent children of theirs send nothing that counts, and whatever goes up to an absent parent does
not matter, because that parent sends ``full`` down. What is no partial sum is the result itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from prismscale.graph.node import CollectiveOp
from prismscale.transfers.schedule import Algorithm, BufferPart, Shape, tree_children, tree_parent


class Say(Enum):
    """What a part of a message is made of."""

    RESULT = "what the receiver ends with"
    REMAINDER = "the result less what live members still add"
    NOTHING = "a value that changes no result"


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What an absent member sends of one part."""

    part: BufferPart
    say: Say
    added_by: tuple[int, ...] = ()
    """Of a remainder: group ranks of live members whose contributions are still to be added."""


def said(shape: Shape, absent: int, receiver: int, part: BufferPart, live: Collection[int]) -> Said:
    """What ``absent`` sends of ``part`` to ``receiver``; ``live``: group ranks of live members."""
    if not part.is_partial:
        return Said(part=part, say=Say.RESULT)
    is_tree = shape.algorithm is Algorithm.TREE and shape.op is not CollectiveOp.REDUCE
    adding = (
        _up_to_root(shape, absent, receiver, live)
        if is_tree
        else _on_to_owner(shape, receiver, part.owner, live)
    )
    if adding:
        return Said(part=part, say=Say.REMAINDER, added_by=adding)
    return Said(part=part, say=Say.NOTHING)


def _on_to_owner(shape: Shape, receiver: int, owner: int, live: Collection[int]) -> tuple[int, ...]:
    """Members from ``receiver`` to ``owner`` around the ring; none if one of them is absent: it
    says what counts."""
    path = tuple((receiver + k) % shape.size for k in range((owner - receiver) % shape.size + 1))
    return path if all(member in live for member in path) else ()


def _up_to_root(shape: Shape, absent: int, receiver: int, live: Collection[int]) -> tuple[int, ...]:
    """Live members connected to a live root, if ``receiver`` is one of them and ``absent`` the
    first absent child that they have."""
    member = receiver
    while member >= 0 and member in live:
        member = tree_parent(member)
    if member >= 0:
        return ()
    connected, waiting, first = [], [0], -1
    while waiting:
        member = waiting.pop(0)
        connected.append(member)
        for child in tree_children(member, shape.size):
            if child in live:
                waiting.append(child)
            elif first < 0:
                first = child
    return tuple(connected) if absent == first else ()
