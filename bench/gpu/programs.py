"""Real programs run plainly on the GPU of this machine: steps, memory, kernels.

    python bench/gpu/programs.py --out DIR [NAME ...]

``programs.json`` names them. Each leaves ``NAME.json`` (:class:`.PlainFigures`) and, in ``logs``,
what it printed and its last steps as torch's profiler saw them. torchtitan 0.2.2 finds the folder
``tokenizer`` and its data set in the folder in which the command runs.
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
from statistics import median

from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleError
from prismscale.files import write_json
from prismscale.measure.gpu_figures import TRACED_STEPS
from prismscale.measure.gpu_machine import describe_machine
from prismscale.validation.gpu_items import OVERHEAD_STEPS, WARM_UP
from prismscale.validation.gpu_runs import GpuRuns, preset_of

PROGRAMS = Path(__file__).with_name("programs.json")


def script_of(command: str) -> Script:
    """A program as ``prismscale run`` takes it."""
    first, *rest = shlex.split(command)
    if first == "-m":
        return Script(target=rest[0], args=tuple(rest[1:]), is_module=True)
    return Script(target=first, args=tuple(rest))


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
                script=script_of(programs[name]),
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
        step_ms = median(figures.step_ns[WARM_UP:-TRACED_STEPS]) / 1e6
        kernel_ms = sum(figures.kernel_ns.values()) / TRACED_STEPS / 1e6
        print(
            f"{name}: step {step_ms:.2f} ms, kernels {kernel_ms:.2f} ms, "
            f"peak {figures.peak_bytes}, reserved {figures.reserved_bytes}; "
            f"took {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
