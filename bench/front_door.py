"""What a newcomer meets first: the demo, the verdict of ``prismscale fit``, the first screen.

    python bench/front_door.py [--part NAME]… [--megatron DIR] [--keep DIR] [--json PATH]

- *demo*: ``make demo``'s command where nothing was captured, and again; what the first screen says.
- *fit*: torchtitan 8B, 70B and 405B, and Megatron-LM's Mixtral where DIR is a checkout of it: how
  long the verdict takes, and whether ``run`` of the same program agrees.
- *mfu*: MFU and tokens a second beside the line that torchtitan itself logs in the same run.

Run with a Python that has torchtitan 0.3.0 and prismscale; Mixtral needs what
``docs/null-device.md`` lists for Megatron-LM. ``--keep`` of ``null_programs.py`` may be the same
folder: a run that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_lm
import null_programs
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from runs import HERE, Runs, folder_name

ROOT = HERE.parent
LIMIT_S = 3600
MOST_FIT_S = {"8b-64": 20, "70b-8192": 40, "405b": 90}
MOST_MIXTRAL_S = 60
PEAK_BAR, MFU_BAR = 0.001, 0.005
FIRST_SCREEN = ("Fits", "Step", "p95", "Tokens/s", "MFU", "HFU", "Exposed", "GPU-hours")
"""Words of the answers that the demo's first screen owes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One program that ``fit`` and ``run`` are asked about."""

    name: str
    most_s: float
    job: tuple[object, ...]
    script: tuple[object, ...]
    runs: Runs


def demo(folder: Path) -> Iterator[Row]:
    """The demo's own command, in a new folder and in the same one again."""
    runs = Runs(folder, limit_s=LIMIT_S)
    words = _demo_command()
    words[words.index("--out") + 1] = str(folder / "demo")
    for name, bar in (("with nothing captured", 180), ("again", 60)):
        began = time.monotonic()
        done = runs.command(*words)
        wall_s = time.monotonic() - began
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            yield Row.at_least(f"demo, {name}: completes", 0, 1)
            return
        yield Row.at_most(f"demo, {name}: wall time", wall_s, bar, "s")
    missing = [word for word in FIRST_SCREEN if word not in done.stdout]
    label = f"demo: answers missing on the first screen {' '.join(missing)}".rstrip()
    yield Row.at_most(label, len(missing), 0)


def _demo_command() -> list[str]:
    """What ``make demo`` runs, without the name of the command."""
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    command = recipe.partition("\n")[2].replace("\\\n", " ")
    words = shlex.split(command)[1:]
    return [str(ROOT / word) if word.startswith("examples/") else word for word in words]


def verdict(asked: Asked) -> Iterator[Row]:
    """``fit`` beside ``run``."""
    # Its time counts: nothing that was captured before is used.
    job = ("--fresh", *_without_device(asked.job))
    found = asked.runs.fit(f"{asked.name}-fit", job, asked.script)
    was_there = (asked.runs.folder / asked.name / "results.json").exists()
    run = asked.runs.run(asked.name, asked.job, asked.script)
    if not found or not run:
        yield Row.at_least(f"{asked.name}: fit and run complete", 0, 1)
        return
    fit = found["variants"][0]["fit"]
    ran = _fullest(asked)
    yield Row.at_most(f"{asked.name}: fit", found["wall_s"], asked.most_s, "s")
    if not was_there:
        yield Row.told(f"{asked.name}: run", sum(run["wall_s"].values()), "s")
    yield Row.at_least(f"{asked.name}: the same verdict", float(fit["fits"] == ran["fits"]), 1)
    for what in ("allocated_bytes", "reserved_bytes", "outside_bytes"):
        error = abs(fit[what] - ran[what]) / fit["held_bytes"]
        label = what.removesuffix("_bytes")
        yield Row.at_most(f"{asked.name}: {label}, difference to run", error, PEAK_BAR)


def _without_device(job: Sequence[object]) -> tuple[object, ...]:
    """``fit`` knows no other device than the null one."""
    at = job.index("--device")
    return (*job[:at], *job[at + 2 :])


def _fullest(asked: Asked) -> dict[str, Any]:
    """What ``run`` answers of memory: told again from the captures that it made."""
    told = asked.runs.folder / f"{asked.name}-run.json"
    out = asked.runs.folder / asked.name
    asked.runs.command("run", *asked.job, "--out", out, "--json", told, *asked.script)
    answers: dict[str, Any] = json.loads(told.read_text())["answers"]["fit"]
    return answers


def mfu(runs: Runs) -> Iterator[Row]:
    """The last line of rank 0's log beside the first screen's own figures, at the same step time:
    torchtitan divides by the time that its process saw, which no other rank delays."""
    case = next(case for case in null_programs.CASES if case.name == "8b-64")
    result = runs.run(case.name, case.job, case.script(runs.folder))
    log = runs.folder / case.name / "logs" / "capture-rank-0.log"
    said = re.findall(r"tps: ([\d,]+).*?mfu: ([\d.]+)%", log.read_text()) if result else []
    if not said:
        yield Row.at_least("mfu: torchtitan logged it", 0, 1)
        return
    tps, its = float(said[-1][0].replace(",", "")), float(said[-1][1]) / 100
    seconds = case.tokens_per_rank / tps
    work = result["work"]["unmasked_flops"] / case.world_size
    ours = work / seconds / result["peak_flops"]
    yield Row.told("mfu: torchtitan's own log line", its, "")
    yield Row.at_most("mfu: as torchtitan counts, relative to it", abs(ours / its - 1), MFU_BAR)
    step_s = result["step_ns"] / 1e9
    yield Row.told("mfu: its step relative to ours, which waits for others", seconds / step_s, "")


def _programs(folder: Path, megatron: Path | None) -> Iterator[Asked]:
    for case in null_programs.CASES:
        if case.name in MOST_FIT_S:
            runs = Runs(folder, limit_s=LIMIT_S, environment=case.environment)
            script = case.script(folder)
            most = MOST_FIT_S[case.name]
            yield Asked(name=case.name, most_s=most, job=case.job, script=script, runs=runs)
    if megatron is None:
        print("left out, needs --megatron: Mixtral")
        return
    mixtral = next(case for case in megatron_lm.CASES if case.name.startswith("Mixtral"))
    yield Asked(
        name=folder_name(mixtral.title),
        most_s=MOST_MIXTRAL_S,
        job=(*("--device", "null", "--cluster", "h100-sxm"), "--world-size", mixtral.world_size),
        script=(megatron / "pretrain_gpt.py", *mixtral.options, *megatron_lm.files(folder)),
        runs=Runs(folder, limit_s=LIMIT_S, environment=megatron_lm.ENVIRONMENT),
    )


def _parts(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Iterator[Row]]]:
    """Names of what is measured, and its rows, which are made as they are asked for."""
    yield "demo", demo(folder)
    megatron = options.megatron.absolute() if options.megatron else None
    for asked in _programs(folder, megatron):
        yield f"fit {asked.name}", verdict(asked)
    yield "mfu", mfu(Runs(folder, limit_s=LIMIT_S))


def main() -> int:
    """Run the parts, print the table, and write it where asked; returns the exit code."""
    options = _arguments()
    rows = read_rows(options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer").exists():
            null_programs.prepare(folder)
        for name, measured in _parts(options, folder):
            if options.part and not any(part in name for part in options.part):
                continue
            found = list(measured)
            rows = renewed(rows, found)
            print(*(f"{row.name}: {row.value:.4g} {row.unit}" for row in found), sep="\n")
            if options.json:
                write_rows(rows, options.json)
    return finish(rows, title="The front door", json_path=options.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", help="part of a part's name; all by default")
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    # For ``--module titan_configs``.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
