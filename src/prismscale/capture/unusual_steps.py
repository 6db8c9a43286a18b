"""Reads the unusual steps beside the traces, matches them between ranks, stores them as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.emulated import Emulated
from prismscale.capture.capture_spec import unusual_path
from prismscale.durations.stored_events import EventFacts, StoredEvent, save_events
from prismscale.errors import GraphError, MismatchError
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.io import load_traces
from prismscale.graph.periodic import (
    PeriodicEvent,
    further_site,
    periodic_events,
    with_ordinary_step,
)
from prismscale.graph.trace import RankTrace
from prismscale.graph.verify import verify


def find_events(captures: Path, traces: Mapping[int, RankTrace]) -> list[PeriodicEvent]:
    """Return the periodic events of the captured ranks.

    Raises:
        FormatError: damaged files beside the traces.
    """
    found = {}
    for rank, trace in traces.items():
        # A rank that ended early does the same as the rank that it was found equal to.
        path = unusual_path(captures, trace.captured_as)
        if path.exists():
            found[rank] = load_traces(path)
    return periodic_events(traces, found) if found else []


def store_events(
    events: Sequence[PeriodicEvent],
    traces: Mapping[int, RankTrace],
    representative_R: NDArray[np.int64],
    groups: GroupTable,
    emulated: Sequence[Emulated],
    folder: Path,
) -> tuple[list[StoredEvent], tuple[str, ...]]:
    """Make a graph of each event and write them to ``folder``.

    Args:
        events: the periodic events.
        traces: by captured rank, its ordinary program.
        representative_R: for every rank the captured rank whose trace it runs.
        groups: the groups of every rank.
        emulated: records of captured ranks on a null device, with their checkpoint writes.
        folder: takes a graph for each event.

    Returns:
        The stored events, and a sentence for each event whose ranks do not fit together: some were
        watched for fewer steps than others, or call different communications.

    Raises:
        StorageError: a file cannot be written.
    """
    stored, unmatched = [], []
    calls = max(t.facts.calls_per_step for t in traces.values())
    for event in events:
        pairs = {rank: with_ordinary_step(own, traces[rank]) for rank, own in event.traces.items()}
        graph = assemble(pairs, representative_R, groups)
        try:
            verify(graph)
        except (GraphError, MismatchError) as error:
            unmatched.append(f"step {event.schedule.first}: {error}")
            continue
        facts = EventFacts(
            numbers=event.schedule.numbers,
            every=event.schedule.every,
            site=further_site(event, traces),
            checkpoint_bytes=_written_bytes(emulated, calls, event.schedule.first),
        )
        stored.append(StoredEvent(facts=facts, graph=graph))
    save_events(stored, folder)
    return stored, tuple(unmatched)


def _written_bytes(emulated: Sequence[Emulated], calls: int, number: int) -> int:
    """Return the most checkpoint bytes that a rank writes in step ``number``.

    A step has ``calls`` optimizer calls.
    """
    written = (
        sum(c.n_bytes for c in rank.checkpoints if c.after_optimizer_calls // calls + 1 == number)
        for rank in emulated
    )
    return max(written, default=0)
