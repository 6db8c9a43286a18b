"""Ranking of points: in one order, and as the Pareto front of speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.points import SweepPoint

_ORDER = (Status.DONE, Status.TOO_LARGE, Status.REFUSED, Status.BROKEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """One row of a sweep."""

    point: SweepPoint
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All rows, the best first."""

    rows: tuple[Explored, ...]
    by_tokens: bool
    """Whether rows are ordered by tokens a second, known for every row that has a step.
    Otherwise the median step orders them."""

    @property
    def chosen(self) -> Explored | None:
        """The best row that fits; None if no row does."""
        first = self.rows[0] if self.rows else None
        return first if first is not None and _class(first.outcome) == 0 else None

    @property
    def front(self) -> tuple[Explored, ...]:
        """Rows that no other row beats in both speed and memory, fastest first."""
        found: list[Explored] = []
        least: int | None = None
        for row in self.rows:
            held = row.outcome.held_bytes
            if _class(row.outcome) == 0 and held is not None and (least is None or held < least):
                found.append(row)
                least = held
        return tuple(found)


def rank(rows: Sequence[Explored]) -> Ranking:
    """Order rows: those that fit by speed, then those that do not, then those without figures."""
    done = [row.outcome for row in rows if row.outcome.status is Status.DONE]
    by_tokens = bool(done) and all(outcome.tokens_per_s for outcome in done)

    def key(row: Explored) -> tuple[float, ...]:
        outcome = row.outcome
        slowness = float(outcome.p50_ns or 0)
        if by_tokens and outcome.tokens_per_s:
            slowness = -outcome.tokens_per_s
        return _class(outcome), slowness, outcome.held_bytes or 0

    # Sorting is stable: equal rows stay in the order of the command line.
    return Ranking(rows=tuple(sorted(rows, key=key)), by_tokens=by_tokens)


def _class(outcome: Outcome) -> int:
    if outcome.status is Status.DONE:
        return 0 if outcome.fits is not False else 1
    return 1 + _ORDER.index(outcome.status)
