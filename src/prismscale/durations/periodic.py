"""Periodic events in a run folder: a graph of each, and a table of when they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prismscale.errors import FormatError
from prismscale.files import write_json
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.periodic import Schedule
from prismscale.graph.store import load_graph, save_graph
from prismscale.toml_dataclass import decode

TABLE = "periodic.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventFacts:
    """What is known of an event besides its graph."""

    first: int
    """Number of the step in which it was first seen, from 1."""
    every: int
    """Steps from one to the next; 0: it came once."""
    seen: int
    """How often."""
    site: str
    """The line from which it communicates; empty where it does not."""
    checkpoint_bytes: int = 0
    """What a captured rank writes in it at most."""

    @property
    def schedule(self) -> Schedule:
        """When it comes."""
        return Schedule(first=self.first, every=self.every, seen=self.seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEvent:
    """An event, and the graph of a job in which it and an ordinary step come in turn."""

    facts: EventFacts
    graph: JobGraph


def save_events(events: Sequence[StoredEvent], folder: Path) -> None:
    """Write all events of a run.

    Raises:
        StorageError: a file cannot be written.
    """
    for n, event in enumerate(events):
        save_graph(event.graph, folder / str(n))
    # The table comes last: it names what is there.
    write_json(folder / TABLE, {"events": [asdict(e.facts) for e in events]})


def load_events(folder: Path) -> list[StoredEvent]:
    """Read what :func:`save_events` wrote; nothing where a run has no periodic events.

    Raises:
        FormatError: damaged files.
    """
    path = folder / TABLE
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["events"]
        facts = [decode(EventFacts, row, str(path)) for row in rows]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} does not list periodic events: {error!r}") from error
    return [StoredEvent(facts=f, graph=load_graph(folder / str(n))) for n, f in enumerate(facts)]
