"""Programs that ran on a GPU against the same ones on the null device: memory, steps, kernels.

    python bench/gpu/against_null.py --gpu h100 --runs DIR [--json PATH] [NAME ...]

Run with the torch that the GPU's figures name, in a folder and with what ``programs.py`` beside
this wants: it made those figures, ``bench/results/<gpu>/programs``. Runs in DIR are kept: those
that are there are not made again. The step of llama-160m-fp32 is told and not scored: its attention
on the H100 gave the constants of 32 bits.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prismscale.measure.gpu_figures import PlainFigures
from prismscale.runfolder import RunFolder
from prismscale.typed_files import decode
from prismscale.validation.gpu_runs import PredictedFigures, predicted_figures, preset_of
from prismscale.validation.rows import Row, finish

RESULTS = Path(__file__).resolve().parents[1] / "results"
DENSE_PEAK, MIXTURE_PEAK, RESERVED = 0.001, 0.01, 0.03
MEDIAN_STEP, BIAS = 0.06, 0.02
LIMIT_S = 600
NOT_SCORED = ("llama-160m-fp32",)
"""Programs by whose steps a constant was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One program, as the GPU and the null device had it."""

    name: str
    real: PlainFigures
    null: PredictedFigures

    @property
    def step_error(self) -> float:
        """Positive where the null device is too slow."""
        return self.null.step_ns / self.real.median_step_ns - 1

    def rows(self) -> list[Row]:
        """Its figures."""
        peak = self.null.peak_bytes - self.real.peak_bytes
        bar = MIXTURE_PEAK if "moe" in self.name else DENSE_PEAK
        reserved = self.null.reserved_bytes / self.real.reserved_bytes - 1
        return [
            Row.told(f"{self.name}: peak, null less real", peak, "bytes"),
            Row.at_most(f"{self.name}: peak, error", abs(peak) / self.real.peak_bytes, bar),
            Row.at_most(f"{self.name}: reserved, error", abs(reserved), RESERVED),
            Row.told(f"{self.name}: step, real", self.real.median_step_ns / 1e6, "ms"),
            Row.told(f"{self.name}: step, null", self.null.step_ns / 1e6, "ms"),
            Row.told(f"{self.name}: step, null over real less 1", self.step_error),
            Row.told(f"{self.name}: kernels, real", self.real.kernel_ns_per_step / 1e6, "ms"),
            Row.told(f"{self.name}: kernels, null", self.null.kernel_ns / 1e6, "ms"),
        ]


def on_null(folder: RunFolder, command: str, cluster: str) -> PredictedFigures:
    """The program's run on the null device, made now or before."""
    if not folder.results.exists():
        run = [sys.executable, "-m", "prismscale", "run", "--device", "null"]
        run += ["--cluster", cluster, "--world-size", "1", "--out", str(folder.root)]
        subprocess.run([*run, *shlex.split(command)], check=True, timeout=LIMIT_S)
    return predicted_figures(folder)


def steps(programs: list[Program]) -> list[Row]:
    """Median and bias of the scored steps together."""
    errors = np.array([p.step_error for p in programs if p.name not in NOT_SCORED])
    return [
        Row.at_most("steps: median error", float(np.median(abs(errors))), MEDIAN_STEP),
        Row.at_most("steps: bias, absolute", abs(float(np.median(errors))), BIAS),
        Row.told("steps: largest error", float(abs(errors).max())),
    ]


def main() -> int:
    """Run what is missing, print, write; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--gpu", choices=sorted(p.parent.name for p in RESULTS.glob("*/programs")), required=True
    )
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    programs, notes = [], set()
    for path in sorted((RESULTS / options.gpu / "programs").glob("*.json")):
        if options.names and path.stem not in options.names:
            continue
        found = json.loads(path.read_text())
        folder = RunFolder(root=options.runs / path.stem)
        null = on_null(folder, found["program"], preset_of(found["gpu"]))
        real = decode(PlainFigures, found["figures"], str(path))
        programs.append(Program(name=path.stem, real=real, null=null))
        notes.add(f"{found['gpu']}, torch {found['torch']}")
    rows = [row for program in programs for row in program.rows()] + steps(programs)
    note = "; ".join(sorted(notes))
    return finish([replace(row, note=note) for row in rows], json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
