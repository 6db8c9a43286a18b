"""Real programs run plainly on the GPU of this machine: steps, memory, kernels.

    python bench/gpu/programs.py --out DIR [NAME ...]

``programs.json`` names them. Each leaves ``NAME.json`` (:class:`.PlainFigures`) and, in ``logs``,
what it printed and its last steps as torch's profiler saw them. Run it in a folder where
``examples`` is this project's and ``prepare`` of ``bench/null_programs.py`` has put a tokenizer and
a text for torchtitan 0.2.2, with ``bench/gpu`` in ``PYTHONPATH`` for ``titan_cut``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleError
from prismscale.files import write_json
from prismscale.measure.gpu_figures import TRACED_STEPS
from prismscale.measure.gpu_machine import describe_machine
from prismscale.program_arguments import script_of
from prismscale.validation.gpu_items import OVERHEAD_STEPS
from prismscale.validation.gpu_runs import GpuRuns, preset_of

PROGRAMS = Path(__file__).with_name("programs.json")


def parsed(command: str) -> Script:
    """A program as ``prismscale run`` takes it."""
    first, *rest = shlex.split(command)
    if first == "-m":
        return script_of(rest[0], rest[1:], command)
    return script_of("", [first, *rest], command)


def main() -> None:
    """Run, print a line of each, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=OVERHEAD_STEPS + TRACED_STEPS)
    options = parser.parse_args()
    programs = json.loads(PROGRAMS.read_text())
    about = describe_machine(shlex.join(["python", *sys.argv]))
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or programs:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            runs = GpuRuns(
                script=parsed(programs[name]),
                scratch=Path(scratch),
                logs=options.out / "logs" / name,
                cluster=preset_of(about["gpu"]),
            )
            try:
                (figures,) = runs.plain(1, steps=options.steps, trace=True)
            except PrismscaleError as error:
                print(f"{name}: FAILED: {error}", flush=True)
                continue
        write_json(
            options.out / f"{name}.json",
            {**about, "program": programs[name], "figures": asdict(figures)},
        )
        step_ms = figures.median_step_ns / 1e6
        kernel_ms = figures.kernel_ns_per_step / 1e6
        print(
            f"{name}: step {step_ms:.2f} ms, kernels {kernel_ms:.2f} ms, "
            f"peak {figures.peak_bytes}, reserved {figures.reserved_bytes}; "
            f"took {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
