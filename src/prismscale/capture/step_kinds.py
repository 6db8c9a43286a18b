"""Sorts a program's steps into kinds: the ordinary step, and unusual steps now and then.

A *step* ends with the last of the optimizers that it calls: the order of the optimizers tells how
many calls make a step, whatever else the program does in it. Steps that do the same work are of one
kind. Most steps are of the same kind; every tenth may log, every fifth evaluate, every hundredth
write a checkpoint. The *ordinary* kind is the most frequent one, and of two equally frequent kinds
the one with fewer nodes. Work between two optimizer calls belongs to the step that the later call
ends: an evaluation after step 5 makes the sixth step longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.capture.node_stream import NodeStream

MAX_OPTIMIZERS = 4096
"""Largest number of optimizer calls in one step: some programs have an optimizer for each
parameter."""
LONGEST_PATTERN = 8
"""Longest repeating pattern of kinds, in steps, for a program without two equal steps in a row."""
OFTEN = 3
"""Steps of one kind after which a program counts as settled if its kinds repeat in no pattern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step as recorded."""

    number: int
    """Counted from 1, the program's first step."""
    start: int
    """Position in the stream of the step's first node."""
    stop: int
    kind: str
    """Hash of the step's work: equal hashes mean equal work."""
    signature: str
    """Hash of the step's work and edges."""


def calls_per_step(owners: Sequence[int]) -> int:
    """Return the number of optimizer calls in a step: the shortest run of optimizers that repeats.

    Args:
        owners: the optimizer of each call, oldest first.
    """
    for period in range(1, min(MAX_OPTIMIZERS, len(owners)) + 1):
        if all(a == b for a, b in zip(owners[period:], owners, strict=False)):
            return period
    return 1


def steps_of(stream: NodeStream) -> list[Step]:
    """Return the complete steps in a stream, oldest first."""
    calls = calls_per_step(stream.owners)
    steps = []
    for number in range(1, len(stream.marks) // calls + 1):
        first, stop = (number - 1) * calls, number * calls
        steps.append(
            Step(
                number=number,
                start=stream.marks[first - 1] if first else 0,
                stop=stream.marks[stop - 1],
                kind="".join(stream.shapes[first:stop]),
                signature="".join(stream.signatures[first:stop]),
            )
        )
    return steps


def ordinary_kind(
    stream: NodeStream, steps: Sequence[Step], equal: int, warm_up: int = 0
) -> str | None:
    """Return the ordinary kind of step, or None while the program has not settled.

    It has settled when ``equal`` steps in a row are equal, edges included, and also all steps into
    which these edges reach (see :attr:`NodeStream.reaches`). Or when a pattern of kinds has come
    twice in a row, as in a program that logs every second step. Or when one kind has come
    :data:`OFTEN` times among others, as in a program that also evaluates every fifth step. The
    first ``warm_up`` steps do not count.
    """
    counted = steps[warm_up:]
    if len(stream.marks) % calls_per_step(stream.owners) or len(counted) < 2:
        return None
    if _settled(stream, steps, equal, warm_up):
        return steps[-1].kind
    for length in range(2, min(LONGEST_PATTERN, len(counted) // 2) + 1):
        last, before = counted[-length:], counted[-2 * length : -length]
        kinds = [s.kind for s in last]
        # A pattern of only one kind does not count: its steps still differ in their edges.
        if len(set(kinds)) > 1 and kinds == [s.kind for s in before]:
            return most_ordinary(last)
    later = steps[max(warm_up, 1) :]
    kind = most_ordinary(later)
    others = {s.kind for s in later[-LONGEST_PATTERN:]} - {kind}
    return kind if others and sum(s.kind == kind for s in later) >= OFTEN else None


def most_ordinary(steps: Sequence[Step]) -> str:
    """Return the most frequent kind; of several, the one with the fewest nodes."""
    counts = Counter(s.kind for s in steps)
    sizes = {s.kind: s.stop - s.start for s in steps}
    return min(counts, key=lambda kind: (-counts[kind], sizes[kind]))


def _settled(stream: NodeStream, steps: Sequence[Step], equal: int, warm_up: int) -> bool:
    run = 1
    while run < len(steps) - warm_up and steps[-run - 1].signature == steps[-1].signature:
        run += 1
    calls = calls_per_step(stream.owners)
    reach = min(stream.reaches[-calls:])
    # A signature encodes an edge from an earlier step by its place on a lane. Its distance is the
    # same in every later step only if all steps in between repeat as well.
    needed = max(equal, 1 + sum(step.stop > reach for step in steps[:-1]))
    return run >= needed
