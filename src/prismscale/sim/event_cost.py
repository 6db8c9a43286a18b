"""What periodic events cost: their steps, re-timed, beside ordinary ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.durations.scenario import Scenario
from prismscale.durations.stored_events import EventFacts, StoredEvent
from prismscale.graph.periodic import Calendar
from prismscale.sim.retime import retime


@dataclass(frozen=True, kw_only=True, slots=True)
class EventCost:
    """An event and what it adds."""

    facts: EventFacts
    extra_ns: int
    """Time of the job that one of them adds to its steps; below 0 where its steps are shorter."""

    rate: float
    """How often it comes, per step."""

    @property
    def per_step_ns(self) -> float:
        """Spread over all steps."""
        return self.extra_ns * self.rate


def event_costs(events: Sequence[StoredEvent], scenario: Scenario, step_ns: int) -> list[EventCost]:
    """What each event adds to a job whose ordinary step takes ``step_ns``."""
    found = []
    often = Calendar(schedules=tuple(e.facts.schedule for e in events)).rates()
    for event, rate in zip(events, often, strict=True):
        both_ns = retime(scenario.durations(event.graph)).step_ns
        extra_ns = both_ns - 2 * step_ns
        found.append(EventCost(facts=event.facts, extra_ns=extra_ns, rate=rate))
    return found
