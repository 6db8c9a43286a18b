"""Which steps a program makes: the ordinary one, and what happens only now and then.

A *step* ends with the last of the optimizers that it calls: the optimizers' own order tells how
many calls are a step, whatever else the program does in it. Steps that do the same work are of one
kind. Most are; every tenth may log, every fifth evaluate, every hundredth write a checkpoint. The
*ordinary* kind is the one that comes most often, and of two that come equally often the one with
less to do. What a program does between two optimizer calls lies in the step that the later one
ends: an evaluation after step 5 makes the sixth step longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.capture.node_stream import NodeStream

MAX_OPTIMIZERS = 16
"""Optimizer calls that one step may hold."""
LONGEST_PATTERN = 8
"""Steps in which kinds may follow each other, for a program without two equal steps in a row."""
OFTEN = 3
"""Steps of one kind that settle a program whose kinds follow each other in no such pattern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step as recorded."""

    number: int
    """From 1, the program's first."""
    start: int
    """Of its nodes in the stream."""
    stop: int
    kind: str
    """Equal text, equal work."""
    signature: str
    """Equal text, equal work and equal edges."""


def calls_per_step(owners: Sequence[int]) -> int:
    """Optimizer calls of a step: the shortest run of optimizers that repeats.

    Args:
        owners: which optimizer each call was of, oldest first.
    """
    for period in range(1, min(MAX_OPTIMIZERS, len(owners)) + 1):
        if all(a == b for a, b in zip(owners[period:], owners, strict=False)):
            return period
    return 1


def steps_of(stream: NodeStream) -> list[Step]:
    """The whole steps in a stream, oldest first."""
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
    """The ordinary kind, once the program has settled; None before.

    It has when ``equal`` steps in a row were equal, edges included, and as far back as these reach
    (see :attr:`NodeStream.reaches`); when kinds have followed each other twice in one pattern, as
    where a program logs every second step; or when one has come :data:`OFTEN` times among others,
    as where it also evaluates every fifth. The first ``warm_up`` steps do not count.
    """
    counted = steps[warm_up:]
    if len(stream.marks) % calls_per_step(stream.owners) or len(counted) < 2:
        return None
    if _settled(stream, steps, equal, warm_up):
        return steps[-1].kind
    for length in range(2, min(LONGEST_PATTERN, len(counted) // 2) + 1):
        last, before = counted[-length:], counted[-2 * length : -length]
        kinds = [s.kind for s in last]
        # Steps of one kind whose edges still differ have not settled.
        if len(set(kinds)) > 1 and kinds == [s.kind for s in before]:
            return most_ordinary(last)
    later = steps[max(warm_up, 1) :]
    kind = most_ordinary(later)
    others = {s.kind for s in later[-LONGEST_PATTERN:]} - {kind}
    return kind if others and sum(s.kind == kind for s in later) >= OFTEN else None


def most_ordinary(steps: Sequence[Step]) -> str:
    """The kind that comes most often; of several, the one with the fewest nodes."""
    counts = Counter(s.kind for s in steps)
    sizes = {s.kind: s.stop - s.start for s in steps}
    return min(counts, key=lambda kind: (-counts[kind], sizes[kind]))


def _settled(stream: NodeStream, steps: Sequence[Step], equal: int, warm_up: int) -> bool:
    run = 1
    while run < len(steps) - warm_up and steps[-run - 1].signature == steps[-1].signature:
        run += 1
    calls = calls_per_step(stream.owners)
    reach = min(stream.reaches[-calls:])
    # An edge that is named by its place on a lane has the distance of every later step only if all
    # that lies between repeats as well.
    needed = max(equal, 1 + sum(step.stop > reach for step in steps[:-1]))
    return run >= needed
