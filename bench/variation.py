"""PRISM's experiments on null runs, beside what was published and measured.

    python bench/variation.py --truth DIR [--part …]… [--ranks N]… [--profile NAME]…
                              [--keep FOLDER] [--json PATH]

Run with a Python that has torchtitan 0.3.0, megatron-core 0.16.1 and prismscale. Everything goes
through the command line; runs that lie in FOLDER are taken as they are, and a row of a part or size
that is left out stays in PATH. Figures of PRISM are told beside ours: arXiv 2510.15596, v1 (1.26 x,
9 %, +9 to 35 %), v2 (18.6/18.8/19.3 s, 8.0 to 15.6 %).

- ``scale``: ``study prism`` of 405B at 512, 8,192 and 65,536 ranks, with the default profile and
  with PRISM's figures of kernels.
- ``agreement``: what ``forecast``, ``sensitivity``, ``place``, ``study`` and ``run`` say of one
  small job, or of 405B where ``--ranks`` says how large, beside each other.
- ``draws``: what 1,000 draws of 405B take.
- ``mlperf``: what a log of one run shows, of as many steps as were logged, beside the median run on
  as many H100. A ratio is the larger over the smaller. What is scored is the default profile with
  the long stalls of the other job's logs (``long_stalls``); with those of both, and at the step
  that was measured (``--compute-scale``), it is told. Warm-up (two steps) is left out of measured
  runs; without steps that follow an evaluation, which are events of the program, the same is scored
  again. GPT-3 on 4,096 GPUs is told, not scored: its rows led to a figure of the profile.
- ``placement``: search beside all placements, and best and worst beside ``run --slow``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from long_stalls import without_the_job
from null_programs import prepare
from prismscale.validation.mlperf import MlperfRun, read_runs
from prismscale.validation.rows import Row, finish, read_rows
from runs import HERE, Runs, is_installed
from variation_programs import SMALL, NullJob, gpt3, llama_405b

LIMIT_S = 7_200
SIZES = (512, 8_192, 65_536)
PROFILES = ("measured", "prism-low", "prism-high")
DRAWS = 1_000
STUDY = ("--draws", 400)
DRAWS_OF_LARGE = ("--draws", 128)
STUDY_OF_LARGE = (*DRAWS_OF_LARGE, "--rounds", 64)
LARGE = 65_536
"""Ranks from which on there are fewer draws, and other profiles than the first have steps alone: a
draw takes as long as eight of 8,192 ranks."""
TRIED = (
    (1.0, 1.0, 1.0, 1.0, 1.05, 1.05, 1.1, 1.1),
    (1.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1),
    (1.2, 1.2, 1.0, 1.0, 1.0, 1.0, 1.4, 1.0),
)
"""Speeds of eight nodes; few enough differ for all placements to be tried."""
JOBS = (*map(llama_405b, (512, 2_048)), gpt3(4_096, 2_048), gpt3(8_192, 4_096))
PRISM = {
    "p50 over the step without variation": (9.0, "%"),
    "p5 over p50": (100 * (18.6 / 18.8 - 1), "%"),
    "p95 over p50": (100 * (19.3 / 18.8 - 1), "%"),
    "one hot node, 1.1 to 1.5 times: least": (9.0, "%"),
    "one hot node, 1.1 to 1.5 times: most": (35.0, "%"),
    "the same hot node at another stage: p95 differs by, least": (8.0, "%"),
    "the same hot node at another stage: p95 differs by, most": (15.6, "%"),
    "worst placement over best, p95": (26.0, "%"),
}
"""Published."""


def published() -> list[Row]:
    """PRISM's own figures, to stand beside ours."""
    return [Row.told(f"PRISM: {name}", *figure) for name, figure in PRISM.items()]


def scale_rows(runs: Runs, sizes: Sequence[int], profiles: Sequence[str]) -> Iterator[Row]:
    """Experiments at each size."""

    def rows(job: NullJob) -> Iterator[Row]:
        for profile in profiles:
            name = f"{job.name}, profile {profile}"
            if job.world_size >= LARGE and profile != PROFILES[0]:
                drawn = (*DRAWS_OF_LARGE, "--no-shares", "--variability", profile)
                yield from step_rows(name, told(runs, "step", "forecast", job.folder, *drawn))
            else:
                yield from study_rows(name, studied(runs, job, profile))

    return of_each(runs, map(llama_405b, sizes), rows)


def of_each(
    runs: Runs, jobs: Iterable[NullJob], rows: Callable[[NullJob], Iterable[Row]]
) -> Iterator[Row]:
    """``rows`` of every job, or that it does not complete."""
    for job in jobs:
        if job.run(runs):
            yield from rows(job)
        else:
            yield Row.at_least(f"{job.name}: completes", 0, 1)


def studied(runs: Runs, job: NullJob, profile: str) -> dict[str, Any]:
    """``prismscale study prism``."""
    effort = STUDY_OF_LARGE if job.world_size >= LARGE else STUDY
    command = ("study", "prism", job.folder, *effort, "--variability", profile)
    return told(runs, "prism", *command)


def told(runs: Runs, section: str, *command: object) -> dict[str, Any]:
    """What a command on a run (its first folder) leaves in the run's results."""
    done = runs.command(*command)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{done.stderr[-3000:]}")
    folder = next(str(part) for part in command if (runs.folder / str(part)).is_dir())
    found = json.loads((runs.folder / folder / "results.json").read_text())
    return dict(found["forecast"][section])


def step_rows(name: str, drawn: Mapping[str, Any]) -> Iterator[Row]:
    """Quantiles of a step."""
    steady_ns = drawn["step_without_variation_ns"]
    low, middle, far = (drawn["quantiles_ns"][q]["value"] for q in ("0.05", "0.5", "0.95"))
    yield Row.told(f"{name}: step without variation", steady_ns / 1e9, "s")
    for q, ns in (("p5", low), ("p50", middle), ("p95", far)):
        yield Row.told(f"{name}: {q}", ns / 1e9, "s")
    yield Row.told(f"{name}: p50 over the step without variation", share(middle, steady_ns), "%")
    yield Row.told(f"{name}: p5 over p50", share(low, middle), "%")
    yield Row.told(f"{name}: p95 over p50", share(far, middle), "%")


def study_rows(name: str, study: Mapping[str, Any]) -> Iterator[Row]:
    """A study in figures."""
    yield from step_rows(name, study)
    for factor, estimate in study["slowdown"].items():
        yield Row.told(f"{name}: P(step > {factor} × median)", 100 * estimate["value"], "%")
    for made in study["classes"]:
        yield Row.told(f"{name}: p95 falls, {made['name']} steady", 100 * made["p95_gain"], "%")
    hot = [100 * h["slowdown"] for h in study["hot"]]
    yield Row.told(f"{name}: one hot node, 1.1 to 1.5 times: least", min(hot), "%")
    yield Row.told(f"{name}: one hot node, 1.1 to 1.5 times: most", max(hot), "%")
    spread = 100 * study["hot_p95_spread"]
    yield Row.told(f"{name}: the same hot node at another stage: p95 differs by", spread, "%")
    tails = {tail["name"]: tail["far_ns"] for tail in study["placement"]["tails"]}
    yield Row.told(f"{name}: worst placement over best, p95", share(*of(tails)), "%")


def of(tails: Mapping[str, float]) -> tuple[float, float]:
    """Worst and best."""
    return tails["worst"], tails["best"]


def share(value: float, base: float) -> float:
    """By how many percent ``value`` is more."""
    return 100 * (value / base - 1)


def agreement_rows(runs: Runs, job: NullJob) -> Iterator[Row]:
    """``study``, ``forecast``, ``sensitivity``, ``place`` and ``run`` of one run: the largest
    difference of what two of them say."""
    few = ("--draws", 64, "--seed", 5)
    study = told(runs, "prism", "study", "prism", job.folder, *few, "--hot", 1.3)
    forecast = told(runs, "step", "forecast", job.folder, *few, "--no-shares")
    sensitivity = told(runs, "sensitivity", "sensitivity", job.folder, *few)
    nodes = ("--nodes", "profile", "--seed", 5, "--hot", 1.3)
    place = told(runs, "placement", "place", job.folder, *nodes)
    step_ns = json.loads((runs.folder / job.folder / "results.json").read_text())["step_ns"]
    parts = (study, forecast, sensitivity, place)
    off = [abs(part["step_without_variation_ns"] - step_ns) for part in parts]
    off += [
        abs(study["quantiles_ns"][q]["value"] - forecast["quantiles_ns"][q]["value"])
        for q in ("0.5", "0.95")
    ]
    off.append(abs(study["quantiles_ns"]["0.95"]["value"] - sensitivity["p95_ns"]))
    off += [abs(study["placement"][key] - place[key]) for key in ("best_ns", "worst_ns")]
    hot = zip(study["hot"], place["hot"], strict=True)
    off += [abs(a["step_ns"] - b["step_ns"]) for a, b in hot]
    name = f"{job.name}: study, forecast, sensitivity, place and run, largest difference"
    yield Row.at_most(name, max(off), 0, "ns")


def draws_rows(runs: Runs, sizes: Sequence[int]) -> Iterator[Row]:
    """What draws take, the command whole."""

    def rows(job: NullJob) -> Iterator[Row]:
        began = time.monotonic()
        told(runs, "step", "forecast", job.folder, "--draws", DRAWS, "--no-shares")
        wall_s = time.monotonic() - began
        name = f"{job.name}: {DRAWS:,} draws, all sources of variation, wall time"
        is_barred = job.world_size == 8_192
        yield Row.at_most(name, wall_s, 180, "s") if is_barred else Row.told(name, wall_s, "s")

    return of_each(runs, map(llama_405b, sizes), rows)


def mlperf_rows(runs: Runs, sizes: Sequence[int], truth: Path) -> Iterator[Row]:
    """Steps of one run beside measured ones."""
    measured = [run for run in read_runs(truth / "mlperf") if "H100" in run.family]
    jobs = [
        job
        for job in JOBS
        if job.world_size in sizes and (job.bench != "gpt3" or is_installed("megatron"))
    ]

    def rows(job: NullJob) -> Iterator[Row]:
        own = [r for r in measured if r.bench == job.bench and r.n_gpus == job.world_size]
        return beside(runs, job, own)

    return of_each(runs, jobs, rows)


def beside(runs: Runs, job: NullJob, measured: Sequence[MlperfRun]) -> Iterator[Row]:
    """Ratios to the median measured run."""
    name = f"{job.name} H100, MLPerf"
    step_ns = float(np.median([np.median(run.steps_ns) for run in measured]))
    steps = round(float(np.median([len(run.steps_ns) for run in measured])))
    drawn = partial(log_of, runs, job.folder, steps)
    profile = without_the_job(job.bench)
    path = runs.folder / f"{profile.name}.toml"
    path.write_text(profile.to_toml())
    scored = drawn("--variability", path)
    as_long = step_ns / scored["step_without_variation_ns"]
    yield Row.told(f"{name}: step, forecast", scored["quantiles_ns"]["0.5"]["value"] / 1e9, "s")
    yield Row.told(f"{name}: step, median of {len(measured)} runs", step_ns / 1e9, "s")
    row = partial(Row.at_most, bar=1.5) if job.is_scored else Row.told
    for how, logs in {
        "": [run.steps_ns for run in measured],
        ", without steps after an evaluation": [run.usual_ns for run in measured],
    }.items():
        for what, ours, theirs in figures_of(scored, logs):
            yield Row.told(f"{name}{how}: {what}, forecast", 100 * ours, "%")
            yield Row.told(f"{name}{how}: {what}, median run", 100 * theirs, "%")
            yield row(f"{name}{how}: {what}, ratio", max(ours / theirs, theirs / ours))
    for how, options in {
        "long stalls of both jobs": (),
        "long stalls of both jobs, a step as long": ("--compute-scale", as_long),
    }.items():
        cv = drawn(*options)["spread"]["log"]["cv"]
        yield Row.told(f"{name}, {how}: CV of the step, forecast", 100 * cv, "%")
    near = float(np.median([cv_of(quiet(run.steps_ns)) for run in measured]))
    yield Row.told(f"{name}: CV of steps within 1 % of their median, median run", 100 * near, "%")


def log_of(runs: Runs, folder: str, steps: int, *options: object) -> dict[str, Any]:
    """The forecast of a run, with what a log of so many steps shows."""
    fixed = ("--draws", DRAWS, "--no-shares", "--log-steps", steps)
    return told(runs, "step", "forecast", folder, *fixed, *options)


def figures_of(
    drawn: Mapping[str, Any], logs_ns: Sequence[np.ndarray[Any, Any]]
) -> Iterator[tuple[str, float, float]]:
    """Of a log: what it is, as it was forecast, and of the median log that was measured."""
    log = drawn["spread"]["log"]
    for what, ours, figure in (
        ("CV of the step", log["cv"], cv_of),
        ("p95 over p50", log["p95"], far_of),
    ):
        yield what, ours, float(np.median([figure(ns) for ns in logs_ns]))


def far_of(steps_ns: np.ndarray[Any, Any]) -> float:
    """How far the p95 lies above the median."""
    return float(np.quantile(steps_ns, 0.95) / np.median(steps_ns) - 1)


def cv_of(steps_ns: np.ndarray[Any, Any]) -> float:
    """Deviation over mean."""
    return float(steps_ns.std(ddof=1) / steps_ns.mean())


def quiet(steps_ns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Without evaluations, restarts and single stalls."""
    return steps_ns[np.abs(steps_ns / np.median(steps_ns) - 1) < 0.01]


def placement_rows(runs: Runs, sizes: Sequence[int]) -> Iterator[Row]:
    """Search beside all placements, and both ends beside ``run --slow``."""
    yield from of_each(runs, [SMALL], partial(searched_rows, runs))

    def rows(job: NullJob) -> Iterator[Row]:
        placed = told(runs, "placement", "place", job.folder, "--nodes", "profile")
        return confirmed(runs, job, job.name, placed)

    yield from of_each(runs, map(llama_405b, sizes), rows)


def searched_rows(runs: Runs, job: NullJob) -> Iterator[Row]:
    """Of a job so small that all placements can be tried."""
    for n, factors in enumerate(TRIED):
        path = runs.folder / f"nodes-{n}.csv"
        lines = (f"n{i},{factor}" for i, factor in enumerate(factors))
        path.write_text("\n".join(["node,factor", *lines]) + "\n")
        found = [
            told(runs, "placement", "place", job.folder, "--nodes", path, how)
            for how in ("--search", "--all")
        ]
        searched, every = (placed["best_ns"] for placed in found)
        name = f"{job.name}, nodes {n}"
        yield Row.told(f"{name}: all placements", found[1]["tried"])
        yield Row.at_least(f"{name}: best of all over best of the search", every / searched, 0.98)
        yield from confirmed(runs, job, name, found[1])


def confirmed(runs: Runs, job: NullJob, name: str, placed: Mapping[str, Any]) -> Iterator[Row]:
    """Best and worst beside ``run --slow @FILE``, in a copy of the run: its captures are reused."""
    for end in ("best", "worst"):
        out = f"{job.folder}-{end}"
        shutil.rmtree(runs.folder / out, ignore_errors=True)
        shutil.copytree(runs.folder / job.folder, runs.folder / out)
        (runs.folder / out / "results.json").unlink()
        file = f"@{runs.folder / job.folder / f'placement-{end}.slow'}"
        slowed = job.run(runs, "--slow", file, out=out).get("step_ns", float("nan"))
        off = 100 * abs(slowed / placed[f"{end}_ns"] - 1)
        yield Row.at_most(f"{name}: {end} placement against run --slow", off, 0.1, "%")


def agreeing_rows(runs: Runs, sizes: Sequence[int]) -> Iterator[Row]:
    """Whether commands agree: on a job that takes a minute, or on 405B of these sizes."""
    jobs = map(llama_405b, sizes) if sizes else (SMALL,)
    return of_each(runs, jobs, partial(agreement_rows, runs))


PARTS = ("agreement", "scale", "draws", "mlperf", "placement")


def main() -> int:
    """Run the parts, print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--truth", type=Path, required=True, help="folder of public measurements")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--ranks", type=int, action="append", help="sizes of jobs; default all")
    parser.add_argument("--profile", action="append", choices=PROFILES, help="of part scale")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer").exists():
            prepare(folder)
        runs = Runs(folder, limit_s=LIMIT_S)
        parts = {
            "agreement": partial(agreeing_rows, runs, options.ranks or ()),
            "scale": partial(scale_rows, runs, options.ranks or SIZES, options.profile or PROFILES),
            "draws": partial(draws_rows, runs, options.ranks or SIZES),
            "mlperf": partial(
                mlperf_rows,
                runs,
                options.ranks or [job.world_size for job in JOBS],
                options.truth,
            ),
            "placement": partial(placement_rows, runs, options.ranks or (512,)),
        }
        rows = published()
        for part in options.part or PARTS:
            rows += list(parts[part]())
    named = {row.name for row in rows}
    kept = [row for row in read_rows(options.json) if row.name not in named]
    return finish([*rows, *kept], title="Variation", json_path=options.json)


if __name__ == "__main__":
    # For ``--module titan_configs``.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
