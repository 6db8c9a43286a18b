"""Made-up hangs, found by the product's own commands.

    python bench/diagnose.py [--world 64]… [--case skipped]… [--json PATH]

One rank of ``programs/mistaken.py`` makes a mistake. ``prismscale run --capture RANK`` (or
``--hang``) must end with a flight record of every rank, from which ``prismscale diagnose`` names
the rank and the line. The same record goes to torch's own analyser: what it says is shown.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows

PROGRAM = Path(__file__).parent / "programs" / "mistaken.py"
WORLDS = (64, 4096)
STEP = 3
TORCHS_OWN = "torch.distributed.flight_recorder.fr_trace"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to hang."""

    name: str
    hangs: bool = False
    """Whether the rank stops by ``--hang``, and makes no mistake."""
    silent: bool = False
    """Whether it leaves no record."""
    in_first_stage: bool = True

    def rank(self, world: int) -> int:
        """Who makes the mistake."""
        return 3 if self.in_first_stage else world // 2 + 6


CASES = (
    Case(name="skipped"),
    Case(name="swapped"),
    Case(name="size"),
    Case(name="other_call"),
    Case(name="other_group"),
    Case(name="extra"),
    Case(name="crossed"),
    Case(name="no_receive", in_first_stage=False),
    Case(name="stuck", hangs=True),
    Case(name="dead", hangs=True, silent=True),
)


def marked_line(name: str) -> int:
    """The line of the program that a finding should name."""
    for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1):
        if name in line.partition("# ")[2].split():
            return number
    raise SystemExit(f"no line of {PROGRAM} is marked '{name}'")


def hang(case: Case, world: int, folder: Path) -> list[Row]:
    """Make the hang, and ask who began it."""
    rank, out, began = case.rank(world), folder / f"{case.name}-{world}", time.monotonic()
    options = ["--hang", f"{rank}@step1"] if case.hangs else ["--capture", str(rank)]
    kind = "none" if case.hangs else case.name
    program = [str(PROGRAM), kind, str(rank), str(STEP)]
    run = ["run", "--device", "null", "--world-size", str(world), "--out", str(out)]
    done = _prismscale(*run, "--no-memory", *options, *program)
    if done.returncode not in (4, 5):
        raise SystemExit(f"{case.name} at {world}: exit code {done.returncode}\n{done.stderr}")
    flight = out / "flight"
    if case.silent:
        (flight / f"nccl_trace_rank_{rank}").unlink()
    made_s, began = time.monotonic() - began, time.monotonic()
    found = json.loads(_prismscale("diagnose", str(flight), "--json").stdout)
    read_s = time.monotonic() - began
    line = found["site"].rpartition(":")[2]
    is_right = found["culprits"] == [rank] and line == str(marked_line(case.name))
    label = f"{world:,} ranks, {case.name}"
    print(f"{label}: {found['explanation']}", flush=True)
    return [
        Row.at_least(f"{label}: rank and line named", float(is_right), 1),
        Row.told(f"{label}: torch's analyser names the rank", _torchs(flight, rank, world), ""),
        Row.told(f"{label}: run", made_s, "s"),
        Row.told(f"{label}: diagnose", read_s, "s"),
    ]


def _torchs(flight: Path, rank: int, world: int) -> float:
    """1 where torchfrtrace names the rank as culprit or missing, 0 where it does not; -1 where it
    was not asked, because it takes hours."""
    if world > WORLDS[0]:
        return -1
    words = [sys.executable, "-m", TORCHS_OWN, str(flight), "--allow-incomplete-ranks"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    named = rf"Culprit rank {rank};|missing ranks: \{{{rank}\}}|from ranks \(\{{{rank}\}}\)"
    return float(re.search(named, said) is not None)


def _prismscale(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prismscale", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, action="append")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = read_rows(asked.json)
    with tempfile.TemporaryDirectory() as folder:
        for world in asked.world or WORLDS:
            for case in CASES:
                if not asked.case or case.name in asked.case:
                    rows = renewed(rows, hang(case, world, Path(folder)))
                    if asked.json:
                        write_rows(rows, asked.json)
    return finish(rows, title="Made-up hangs", json_path=asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
