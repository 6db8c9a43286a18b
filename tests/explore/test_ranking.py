"""Which points are best."""

from __future__ import annotations

from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.points import SweepPoint
from prismscale.explore.ranking import Explored, rank

MEMORY = 100


def row(
    name: str, p50_ns: int | None, held: int | None = 50, tokens: int | None = None
) -> Explored:
    """A point of this name; without a step the program refused it."""
    outcome = Outcome(
        key="",
        status=Status.REFUSED if p50_ns is None else Status.DONE,
        p50_ns=p50_ns,
        held_bytes=held,
        memory_bytes=None if held is None else MEMORY,
        tokens_per_step=tokens,
    )
    return Explored(point=SweepPoint(values={"n": name}, arguments=(name,)), outcome=outcome)


def names(rows: tuple[Explored, ...]) -> list[str]:
    return [r.point.values["n"] for r in rows]


def test_the_fastest_that_fits_is_chosen() -> None:
    """Faster ones that do not fit come behind all that do, and refused ones last."""
    ranking = rank([row("refused", None), row("large", 1, held=101), row("a", 3), row("b", 2)])
    assert names(ranking.rows) == ["b", "a", "large", "refused"]
    assert ranking.chosen is not None
    assert ranking.chosen.point.values == {"n": "b"}


def test_tokens_a_second_count_where_all_are_known() -> None:
    """A longer step of more tokens is faster."""
    slow, fast = row("slow", 100, tokens=10), row("fast", 200, tokens=40)
    assert names(rank([slow, fast]).rows) == ["fast", "slow"]
    assert rank([slow, fast]).by_tokens
    unknown = rank([slow, fast, row("unknown", 150)])
    assert not unknown.by_tokens
    assert names(unknown.rows) == ["slow", "unknown", "fast"]


def test_the_front_has_whom_nobody_beats_in_both() -> None:
    """Fastest first; equal points once."""
    rows = [row("a", 1, 90), row("b", 2, 60), row("c", 3, 70), row("d", 4, 40), row("e", 4, 40)]
    assert names(rank(rows).front) == ["a", "b", "d"]


def test_nothing_is_chosen_where_nothing_fits() -> None:
    """Nor where memory is known to be too small, or nothing was run."""
    assert rank([row("refused", None)]).chosen is None
    assert rank([row("large", 1, held=200)]).chosen is None
    assert rank([row("unknown", 1, held=None)]).chosen is not None
