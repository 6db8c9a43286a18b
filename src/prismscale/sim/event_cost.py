"""Costs of periodic events: their steps are re-timed and compared with ordinary steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.durations.scenario import Scenario
from prismscale.durations.stored_events import EventFacts, StoredEvent
from prismscale.graph.periodic import Calendar
from prismscale.sim.retime import retime


@dataclass(frozen=True, kw_only=True, slots=True)
class EventCost:
    """A periodic event and the time that it adds to the job."""

    facts: EventFacts
    extra_ns: int
    """Time that one event adds to the job; negative if its steps are shorter than ordinary ones."""

    rate: float
    """How often the event comes, per step."""

    @property
    def per_step_ns(self) -> float:
        """The added time, spread over all steps."""
        return self.extra_ns * self.rate


def event_costs(events: Sequence[StoredEvent], scenario: Scenario, step_ns: int) -> list[EventCost]:
    """Return the cost of each event in a job whose ordinary step takes ``step_ns``."""
    found = []
    often = Calendar(schedules=tuple(e.facts.schedule for e in events)).rates()
    for event, rate in zip(events, often, strict=True):
        both_ns = retime(scenario.durations(event.graph)).step_ns
        extra_ns = both_ns - 2 * step_ns
        found.append(EventCost(facts=event.facts, extra_ns=extra_ns, rate=rate))
    return found
