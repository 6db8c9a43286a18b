"""Describes who waits for whom in a simulation that cannot go on, or in which ranks hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prismscale.errors import StuckError
from prismscale.sim.program import JobProgram
from prismscale.sim.state import ClassState, CollectiveInstance

MOST_NAMED = 8
"""Most lines of a message: thousands of stuck ranks have the same few reasons everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """One group whose members wait for ranks that never arrive."""

    what: str
    """The communication: operation, bytes, group, call site."""
    group: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks of the group that never arrive."""

    def sentence(self) -> str:
        """Return the hang as one line of text."""
        here = [r for r in self.group if r not in self.missing]
        return f"{who_waits(here)} for {what_ranks(self.missing)}: {self.what}"


def what_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 17``, ``ranks 0, 8, 16`` or ``ranks 0, 1, 2 … 63 (64)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return "ranks " + ", ".join(str(r) for r in ranks)
    head = ", ".join(str(r) for r in ranks[:3])
    return f"ranks {head} … {ranks[-1]} ({len(ranks)})"


def who_waits(ranks: Sequence[int]) -> str:
    """Return ``rank 17 waits`` or ``ranks 0, 8 wait``."""
    return f"{what_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def describe_stuck(
    job: JobProgram,
    states: Sequence[ClassState],
    instances: Mapping[tuple[int, int], CollectiveInstance],
) -> StuckError:
    """Return the error for a job in which no class can advance."""
    lines = []
    for (channel_index, count), instance in instances.items():
        channel = job.channels[channel_index]
        here = [c for c, _ in instance.present]
        absent = [c for c in channel.classes if c not in here]
        index, x = instance.present[0]
        trace = job.graph.classes[index].trace
        waiting = sorted(int(job.graph.classes[c].members_M[0]) for c in here)
        awaited = sorted(int(job.graph.classes[c].members_M[0]) for c in absent)
        lines.append(
            f"{who_waits(waiting)} for {what_ranks(awaited)} in use {count} of "
            f"{trace.describe(trace.template(x))}"
        )
    blocked = sum(s.position < s.stop for s in states)
    shown = "\n  ".join(lines[:MOST_NAMED])
    more = f"\n  … and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    return StuckError(
        f"{blocked} of {len(states)} rank classes cannot advance. Each line names one rank of a "
        f"class:\n  {shown}{more}\n"
        "A send without its receive, or groups used in different order by their members, does this."
    )


def find_hangs(job: JobProgram, instance: CollectiveInstance, never: int) -> list[Hang]:
    """Return the groups of ``instance`` at which some members arrive and others never do."""
    graph = job.graph
    arrival_of: dict[int, int] = {}
    for class_index, arrival in instance.arrivals:
        members = graph.classes[class_index].members_M
        # All draws share the structure of a hang, so the first one is enough.
        row = arrival.reshape(-1, arrival.shape[-1])[0]
        times = np.broadcast_to(row, len(members))
        arrival_of.update(zip(members.tolist(), times.tolist(), strict=True))
    key = job.channels[instance.channel].key
    table = graph.families[key.family].ranks_KG
    if key.is_p2p:
        table = table[[key.source, key.destination]]
    class_index, x = instance.present[0]
    trace = graph.classes[class_index].trace
    what = trace.describe(trace.template(x))
    hangs = []
    for g in range(table.shape[1]):
        ranks = table[:, g].tolist()
        missing = tuple(r for r in ranks if arrival_of[r] >= never)
        # If no member arrives, the reason is another group.
        if missing and len(missing) < len(ranks):
            hangs.append(Hang(what=what, group=tuple(ranks), missing=missing))
    return hangs
