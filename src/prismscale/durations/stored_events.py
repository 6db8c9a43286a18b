"""Periodic events in a run folder: a graph for each event, and a table of when they occur."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prismscale.errors import FormatError, UsageError
from prismscale.files import write_json
from prismscale.graph.io import load_graph, save_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.periodic import Schedule
from prismscale.typed_files import decode

TABLE = "periodic.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventFacts:
    """Facts about a periodic event besides its graph."""

    numbers: tuple[int, ...]
    """Steps in which the event was seen, counted from 1."""
    every: int
    """Steps from one occurrence to the next; 0 if it occurred once."""
    site: str
    """Source line from which the event communicates; empty where it does not."""
    checkpoint_bytes: int = 0
    """Most checkpoint bytes that any captured rank writes in the event."""

    def __post_init__(self) -> None:
        if not self.numbers or min(self.numbers) < 1 or self.every < 0:
            raise UsageError(
                f"an event in steps {list(self.numbers)}, every {self.every}: it comes in one step "
                "at least, and steps are numbered from 1"
            )

    @property
    def schedule(self) -> Schedule:
        """When the event occurs."""
        return Schedule(numbers=self.numbers, every=self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEvent:
    """An event, and the graph of a job in which it alternates with an ordinary step."""

    facts: EventFacts
    graph: JobGraph


def save_events(events: Sequence[StoredEvent], folder: Path) -> None:
    """Write all events of a run.

    Raises:
        StorageError: a file cannot be written.
    """
    for n, event in enumerate(events):
        save_graph(event.graph, folder / str(n))
    # The table is written last, so that every event it lists has its graph.
    write_json(folder / TABLE, {"events": [asdict(e.facts) for e in events]})


def load_events(folder: Path) -> list[StoredEvent]:
    """Read what :func:`save_events` wrote; an empty list where a run has no periodic events.

    Raises:
        FormatError: a file is damaged.
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
