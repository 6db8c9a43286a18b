"""Periodic events of a captured job: read beside the traces, matched between ranks, stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.capture.spec import unusual_path
from prismscale.durations.periodic import EventFacts, StoredEvent, save_events
from prismscale.errors import GraphError, MismatchError
from prismscale.graph.assemble import assemble
from prismscale.graph.groups import GroupTable
from prismscale.graph.periodic import (
    PeriodicEvent,
    further_site,
    periodic_events,
    with_ordinary_step,
)
from prismscale.graph.store import load_traces
from prismscale.graph.trace import RankTrace
from prismscale.graph.verify import verify


def find_events(captures: Path, traces: Mapping[int, RankTrace]) -> list[PeriodicEvent]:
    """What the captured ranks did only now and then.

    Raises:
        FormatError: damaged files beside the traces.
    """
    found = {}
    for rank, trace in traces.items():
        # A rank that ended early does what the one does that it was found equal to.
        path = unusual_path(captures, int(trace.meta.get("followed", rank)))
        if path.exists():
            found[rank] = load_traces(path)
    return periodic_events(traces, found) if found else []


def store_events(
    events: Sequence[PeriodicEvent],
    traces: Mapping[int, RankTrace],
    representative_R: NDArray[np.int64],
    groups: GroupTable,
    folder: Path,
) -> tuple[list[StoredEvent], tuple[str, ...]]:
    """Make a graph of each event and write them to ``folder``.

    Returns:
        The events, and a sentence for each whose ranks do not fit together: some were watched for
        fewer steps than others, or call different things.

    Raises:
        StorageError: a file cannot be written.
    """
    stored, unmatched = [], []
    for event in events:
        pairs = {rank: with_ordinary_step(own, traces[rank]) for rank, own in event.traces.items()}
        graph = assemble(pairs, representative_R, groups)
        try:
            verify(graph)
        except (GraphError, MismatchError) as error:
            unmatched.append(f"step {event.schedule.first}: {error}")
            continue
        facts = EventFacts(
            first=event.schedule.first,
            every=event.schedule.every,
            seen=event.schedule.seen,
            site=further_site(event, traces),
        )
        stored.append(StoredEvent(facts=facts, graph=graph))
    save_events(stored, folder)
    return stored, tuple(unmatched)
