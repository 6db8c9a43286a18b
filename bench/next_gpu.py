"""Steps of a GPU that nobody measured: a B200, by an H100's constants and its data sheet.

    python bench/next_gpu.py --runs DIR [--truth DIR] [--json PATH]

SimuMax's records of Megatron-LM are the measured steps. DIR is what ``bench/simumax_records.py
--keep DIR`` left: its runs are priced anew, none runs again. Every kernel of a run gets the price
that it would have if a B200 were known by its data sheet alone (peaks, bandwidth, multiprocessors,
watts) and an H100's constants stood for its own: a file with ``base = "b200"`` and
``device.scaled_from`` says so to ``prismscale forecast --cluster``. Communication keeps the B200's
constants.

Not blind: see *From a data sheet* in docs/accuracy.md. What lasts of an H100's products under its
power limit is itself shifted from the B200's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from prismscale.validation.error_rows import error_rows
from prismscale.validation.rows import Row, finish
from prismscale.validation.steps.measured import SIMUMAX, MeasuredStep, load_measured
from runs import Runs, our_commit

DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
GPU, OTHER = "b200", "h100-sxm"
LIMIT_S = 600
BRIEF = ("--variability", "none", "--draws", 8, "--no-shares", "--executor", "serial")
CLUSTER = f"""
base = "{GPU}"
name = "{GPU}-by-its-data-sheet"

[device]
scaled_from = "{OTHER}"
multiprocessors = 148
power_watts = 1000
"""
"""The rest of the data sheet is the preset's own."""


def measure(step: MeasuredStep, runs: Runs, cluster: Path) -> Iterator[Row]:
    """One kept run, priced anew."""
    run = runs.folder / step.case
    if not (run / "results.json").exists():
        return
    done = runs.command("forecast", run, "--cluster", cluster, *BRIEF)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        yield Row.at_least(f"{step.case}: completes", 0, 1)
        return
    found = json.loads((run / "results.json").read_text(encoding="utf-8"))
    step_ms = found["forecast"]["step"]["step_without_variation_ns"] / 1e6
    mark = "" if step.is_scored else ", not scored"
    yield Row(
        name=f"{step.case}: step {step_ms:.1f} of {step.step_ms:.1f} ms{mark}",
        value=100 * (step_ms / step.step_ms - 1),
        unit="%",
        note=f"prismscale {our_commit()}",
    )


def main() -> int:
    """Price the runs, print the table, and write it where asked; returns the exit code."""
    options = _arguments()
    runs = Runs(options.runs.absolute(), limit_s=LIMIT_S)
    cluster = runs.folder / "by-its-data-sheet.toml"
    cluster.write_text(CLUSTER, encoding="utf-8")
    steps = [step for step in load_measured(options.truth) if step.family == SIMUMAX]
    rows = [row for step in steps for row in measure(step, runs, cluster)]
    scored = [row.value for row in rows if row.name.endswith(" ms")]
    rows += error_rows(f"{GPU} steps from {OTHER}", scored, of="steps")
    return finish(rows, title=f"Steps of a {GPU} by an {OTHER}", json_path=options.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of kept runs")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
