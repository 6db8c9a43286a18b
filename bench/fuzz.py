"""Damaged files for every reader of files that others write.

    python bench/fuzz.py [--seconds 120] [--cases N] [--reader NAME]… [--seed N] [--json PATH]

A reader must give a right answer or a clear error: no traceback, no hang over 10 s, no more than
1 GiB, no message of any length, and nothing in it that a terminal would obey. Cases are the same
for the same seed. The time is shared between readers, each of which runs in a process of its own;
several sessions (``--seed``) may add to one file of results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import tests_on_path  # noqa: F401
from prismscale.validation.rows import Row, finish
from support.fuzzing import Outcomes, fuzz
from support.readers import all_readers

BARS = {"text": 1_000_000, "Parquet": 100_000}
"""Cases of all readers of a format together, where a run is to be scored."""


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


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--cases", type=int, default=10**9, help="of each reader")
    parser.add_argument("--reader", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scored", action="store_true", help="hold numbers of cases to their bar")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        readers = [r for r in all_readers(Path(folder)) if r.name in (asked.reader or [r.name])]
    share = asked.seconds / len(readers)
    rows, cases = [], dict.fromkeys(BARS, 0)
    for reader in readers:
        # A process of its own: one that is killed for its memory takes no other with it.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(_fuzzed, (reader.name, asked.seed, asked.cases, share))
        cases[reader.format] += found.cases
        for failure in found.failures:
            print(failure, flush=True)
        rows += [
            Row.at_most(f"{reader.name}: failures", found.n_failures, 0),
            Row.told(f"{reader.name}: cases", found.cases, ""),
            Row.told(f"{reader.name}: refused", found.refused / max(found.cases, 1) * 100, "%"),
            Row.told(f"{reader.name}: longest", found.longest_s, "s"),
            Row.told(f"{reader.name}: memory", found.highest_bytes / 2**20, "MiB"),
        ]
    for kind, n in cases.items():
        if asked.scored:
            rows.append(Row.at_least(f"{kind}: cases", n, BARS[kind]))
        else:
            rows.append(Row.told(f"{kind}: cases", n, ""))
    return finish(rows, title="Damaged files", json_path=asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
