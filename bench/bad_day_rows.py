"""Rows of ``bad_days.py``, to which further seeds are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prismscale.validation.rows import Row

COUNTED = ("left running", "half-written", "wrong exit code", "not the same again")
TIMES, SEEDS = "times", "seeds "


def rows_with(
    before: Sequence[Row], name: str, seed: int, times: int, seen: Mapping[str, int]
) -> list[Row]:
    """``before`` with what ``times`` more faults of part ``name`` showed.

    Raises:
        SystemExit: a seed that is counted already.
    """
    own = {row.name: row for row in before if row.name.startswith(f"{name}: ")}
    counted = own.get(f"{name}: {TIMES}")
    seeds = counted.note.removeprefix(SEEDS).split(", ") if counted else []
    if str(seed) in seeds:
        raise SystemExit(f"{name}: seed {seed} is counted already; give another --seed")
    total = times + (int(counted.value) if counted else 0)
    note = SEEDS + ", ".join([*seeds, str(seed)])
    rows = [Row(name=f"{name}: {TIMES}", value=total, note=note)]
    for what in COUNTED:
        earlier = own.get(f"{name}: {what}")
        rows.append(
            Row.at_most(f"{name}: {what}", seen[what] + (earlier.value if earlier else 0), 0)
        )
    return [row for row in before if row.name not in own] + rows
