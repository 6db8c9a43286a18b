"""Rules for what absent neighbours send, so that live members end with the right result.

These are PrismLLM's rules (section on pruned collectives). In a *ring*, a chunk goes around once
and ends at its owner. If the owner is live, the last absent member before it does not send a
partial sum, but ``full`` less the contributions that the members after it still add. Partial sums
that have yet to pass an absent member are arbitrary. In a *tree*, consider the live members that
are connected to a live root. One absent child of theirs sends ``full`` less the contributions of
all of them; their other absent children send neutral values. Whatever goes up to an absent parent
does not matter, because that parent sends ``full`` down. A message that is no partial sum holds the
result itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from prismscale.graph.node import CollectiveOp
from prismscale.transfers.schedule import Algorithm, BufferPart, Shape, tree_children, tree_parent


class Say(Enum):
    """The content of one part of a message."""

    RESULT = "what the receiver ends with"
    REMAINDER = "the result less what live members still add"
    NOTHING = "a value that changes no result"


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """The content that an absent member sends for one buffer part."""

    part: BufferPart
    say: Say
    added_by: tuple[int, ...] = ()
    """For a remainder: group ranks of live members whose contributions are still to be added."""


def said(shape: Shape, absent: int, receiver: int, part: BufferPart, live: Collection[int]) -> Said:
    """Return what ``absent`` sends for ``part``; ``live`` are group ranks of live members."""
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
    """Return the members from ``receiver`` to ``owner`` around the ring.

    Returns none if one of them is absent, because that one sends what counts.
    """
    path = tuple((receiver + k) % shape.size for k in range((owner - receiver) % shape.size + 1))
    return path if all(member in live for member in path) else ()


def _up_to_root(shape: Shape, absent: int, receiver: int, live: Collection[int]) -> tuple[int, ...]:
    """Return the live members that are connected to a live root.

    Returns none unless ``receiver`` is one of them and ``absent`` is their first absent child.
    """
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
