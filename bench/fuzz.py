"""Damaged files for every reader of files that others write.

    python bench/fuzz.py [--seconds 120] [--cases N] [--reader NAME]… [--seed N] [--add] [--scored]
                         [--json PATH]

A reader must give a right answer or a clear error: no traceback, no hang over 10 s, no more than
1 GiB, no message of any length, nothing in it that a terminal would obey, and nothing said on the
side. Cases are the same for the same seed. The time is shared between readers, each of which runs
in a process of its own. ``--add`` adds a further seed to what PATH holds, so that a long run can be
made in pieces.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import tests_on_path  # noqa: F401
from prismscale.validation.rows import Row, finish, read_rows
from support.foreign_reader import Reader
from support.fuzzing import Outcomes, fuzz
from support.readers import all_readers

BARS = {"text": 1_000_000, "Parquet": 100_000}
"""Cases of all readers of a format together, where a run is to be scored."""
_SEEDS = "seeds "


def _fuzzed(name: str, seed: int, cases: int, seconds: float) -> Outcomes:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        made, own = Path(folder) / "made", Path(folder) / "own"
        made.mkdir()
        own.mkdir()
        (reader,) = (r for r in all_readers(made) if r.name == name)
        return fuzz(reader, own, seed, cases=cases, until=time.monotonic() + seconds)


def _memory() -> str | None:
    """A folder in memory, where there is one: disks are not what is tested."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _measured(reader: Reader, asked: argparse.Namespace, seconds: float) -> list[Row]:
    """One reader's rows; failures are printed."""
    # A process of its own: one that is killed for its memory takes no other with it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            found = pool.submit(_fuzzed, reader.name, asked.seed, asked.cases, seconds).result()
        except BrokenProcessPool:
            found = Outcomes()
            found.failed(f"{reader.name}, seed {asked.seed}", "its process was killed")
    for failure in found.failures:
        print(failure, flush=True)
    cases = Row.told(f"{reader.name}: cases", found.cases)
    return [
        Row.at_most(f"{reader.name}: failures", found.n_failures, 0),
        replace(cases, note=f"{_SEEDS}{asked.seed}"),
        Row.told(f"{reader.name}: refused", found.refused),
        Row.told(f"{reader.name}: longest", found.longest_s, "s"),
        Row.told(f"{reader.name}: memory", found.highest_bytes / 2**20, "MiB"),
    ]


def added(before: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Rows of several seeds as one: numbers are added, of times and memory the highest counts.

    Raises:
        SystemExit: a seed whose cases are counted already.
    """
    earlier = {row.name: row for row in before}
    return [_sum(earlier.pop(row.name), row) if row.name in earlier else row for row in rows] + [
        row for row in earlier.values() if not row.name.startswith(tuple(f"{k}:" for k in BARS))
    ]


def _sum(one: Row, other: Row) -> Row:
    if one.unit:
        return replace(other, value=max(one.value, other.value))
    seeds = one.note.removeprefix(_SEEDS).split(", ") if one.note else []
    again = other.note.removeprefix(_SEEDS)
    if again in seeds:
        raise SystemExit(f"{other.name}: seed {again} is counted already; give another --seed")
    total = one.value + other.value
    note = f"{one.note}, {again}" if seeds else ""
    return replace(other, value=total, note=note, ok=other.bar is None or total <= other.bar)


def _totals(rows: Sequence[Row], formats: dict[str, str], scored: bool) -> list[Row]:
    """Cases of each format."""
    totals = dict.fromkeys(BARS, 0.0)
    for row in rows:
        name, _, what = row.name.rpartition(": ")
        if what == "cases" and name in formats:
            totals[formats[name]] += row.value
    if scored:
        return [Row.at_least(f"{kind}: cases", n, BARS[kind]) for kind, n in totals.items()]
    return [Row.told(f"{kind}: cases", n) for kind, n in totals.items()]


def main() -> int:
    """Run the bench; returns the exit code."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        known = all_readers(Path(folder))
    readers = [r for r in known if r.name in (asked.reader or [r.name])]
    before = read_rows(asked.json) if asked.add else []
    rows = []
    for reader in readers:
        rows += _measured(reader, asked, asked.seconds / len(readers))
    rows = added(before, rows)
    rows += _totals(rows, {r.name: r.format for r in known}, asked.scored)
    return finish(rows, title="Damaged files", json_path=asked.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--cases", type=int, default=10**9, help="of each reader")
    parser.add_argument("--reader", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="to the rows that PATH holds")
    parser.add_argument("--scored", action="store_true", help="hold numbers of cases to their bar")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
