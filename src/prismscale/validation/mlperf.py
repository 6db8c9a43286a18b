"""Forecasts of public step times: MLPerf training logs of jobs that were run several times.

A forecast from one run is the pool of its steps, with the far tail of runs of other configurations
(:func:`.borrowed_tail`), because a run has only two to six steps beyond its p99. The forecast is
compared with every repeat run of the same configuration. Carried over to another median
(:func:`.carry_over`), it is compared with runs of the same submitter and accelerator at another
scale. Three references stand beside it: the bare pool, a fitted distribution, and the steps of all
repeat runs including the forecast one, which no distribution could beat. Only logs with one time
per step are used, so not Llama-3.1-8B, which is logged every 32 steps.
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.forecast.distributions.duration_distribution import borrowed_tail, fit
from prismscale.forecast.distributions.scaling import carry_over
from prismscale.validation.goodness import Agreement, agreement, random_halves
from prismscale.validation.rows import Row

Floats = NDArray[np.float64]

WARM_UP_STEPS = 2
"""Number of first steps that are left out, because they are slow for reasons of their own."""
EVENT_S = 0.5
"""A step follows an evaluation if it begins at least this much later than the step before ended. In
all logs these gaps are longer than 1.3 s, and all others are shorter than 0.4 s."""
QUANTILES = (np.arange(4_000) + 0.5) / 4_000
"""Evenly spaced quantiles that represent a distribution where it is compared with a sample."""


@dataclass(frozen=True, kw_only=True)
class MlperfRun:
    """One run of a job."""

    bench: str
    configuration: str
    """Name that repeat runs share."""
    family: str
    """Name that runs of one round, submitter, benchmark and accelerator share at any scale."""
    n_gpus: int
    steps_ns: Floats
    """Times of consecutive steps, without warm-up."""
    after_event_B: NDArray[np.bool_]
    """Whether each step directly follows an evaluation."""

    @property
    def usual_ns(self) -> Floats:
        """Step times without steps that follow an evaluation.

        405B's first such step takes 2 to 20 % longer in every run of v5.0. GPT-3's on 4,096 GPUs
        and more are 2 % shorter."""
        return self.steps_ns[~self.after_event_B]


def read_runs(folder: Path) -> list[MlperfRun]:
    """Read all runs of GPT-3 and Llama-3.1-405B with raw step times, repeated submissions once.

    Raises:
        FormatError: files are missing or damaged.
    """
    try:
        with (folder / "mlperf_llm_runs.csv").open(newline="", encoding="utf-8") as text:
            about = {row["run_id"]: row for row in csv.DictReader(text)}
        files = [*folder.glob("steps/*_gpt3.csv.gz"), *folder.glob("steps/*_llama31_405b.csv.gz")]
        series: dict[str, list[tuple[float, float]]] = {}
        for path in sorted(files):
            with gzip.open(path, "rt", newline="", encoding="utf-8") as text:
                for row in csv.DictReader(text):
                    times = float(row["step_time_s"]), float(row["end_time_ms"] or "nan") / 1e3
                    series.setdefault(row["run_id"], []).append(times)
    except (OSError, KeyError, ValueError, EOFError) as error:
        raise FormatError(f"{folder}: not the MLPerf step times ({error!r})") from error
    # v5.1 repeats some submissions of v5.0 byte for byte.
    steps = {run_id: tuple(step_s for step_s, _ in own) for run_id, own in series.items()}
    distinct = {own: run_id for run_id, own in reversed(steps.items())}
    runs = []
    for run_id in series:
        if distinct[steps[run_id]] == run_id:
            facts = about[run_id]
            family = (facts["round"], facts["submitter"], facts["bench"], facts["accelerator"])
            step_s, end_s = np.array(series[run_id]).T
            pause_s = np.diff(end_s, prepend=np.nan) - step_s
            runs.append(
                MlperfRun(
                    bench=facts["bench"],
                    configuration=run_id.rpartition("/")[0],
                    family=" ".join(family),
                    n_gpus=int(facts["n_gpus"]),
                    steps_ns=step_s[WARM_UP_STEPS:] * 1e9,
                    after_event_B=pause_s[WARM_UP_STEPS:] > EVENT_S,
                )
            )
    return runs


def validate(truth: Path) -> list[Row]:
    """Return the rows of MLPerf logs.

    Args:
        truth: folder of public measurements, with the folder ``mlperf``.

    Raises:
        FormatError: files are missing or damaged.
    """
    runs = read_runs(truth / "mlperf")
    return [*repeat_rows(runs), *scale_rows(runs)]


def repeat_rows(runs: list[MlperfRun]) -> list[Row]:
    """Compare forecasts from one run with its repeat runs."""
    pairs = [(a, b) for a, b in itertools.permutations(runs, 2) if _repeats(a, b)]
    tailed = {id(run): _with_borrowed_tail(run, runs) for run in runs}
    ours = [agreement(tailed[id(a)], b.steps_ns) for a, b in pairs]
    bare = [agreement(a.steps_ns, b.steps_ns) for a, b in pairs]
    every = [agreement(_all_repeats(b, runs), b.steps_ns) for _, b in pairs]
    distributions = {id(run): fit(run.steps_ns).distribution for run in runs}
    fitted = [agreement(distributions[id(a)].quantile(QUANTILES), b.steps_ns) for a, b in pairs]
    floor = list(_floor(runs))
    point = [abs(np.median(a.steps_ns) / np.quantile(b.steps_ns, 0.95) - 1) for a, b in pairs]
    normal = [agreement(_robust_normal(a.steps_ns), b.steps_ns) for a, b in pairs]
    name = f"MLPerf repeat runs ({len(pairs)} pairs)"
    ks, p95 = _spread(ours, "centred_ks"), _spread(ours, "p95", 100)
    p99, p99_bare = _spread(ours, "p99", 100), _spread(bare, "p99", 100)
    ks_normal = _spread(normal, "centred_ks")[0]
    return [
        Row.at_most(f"{name}: median-centred KS, median", ks[0], 0.12),
        Row.at_most(f"{name}: median-centred KS, p90", ks[1], 0.20),
        Row.at_most(f"{name}: p95, median error", p95[0], 0.3, "%"),
        Row.at_most(f"{name}: p95, p90 of errors", p95[1], 1.0, "%"),
        Row.at_most(f"{name}: p99, median error", p99[0], 0.6, "%"),
        Row.at_most(f"{name}: p99, p90 of errors", p99[1], 2.0, "%"),
        Row.told(
            f"{name}: p99, p90 of errors, of all repeat runs' steps, the forecast one's included",
            _spread(every, "p99", 100)[1],
            "%",
        ),
        Row.told(
            f"{name}: p99, p90 between random halves of one run",
            _spread(floor, "p99", 100)[1],
            "%",
        ),
        Row.told(f"{name}: p99, median error, without the tail of others", p99_bare[0], "%"),
        Row.told(f"{name}: p99, p90 of errors, without the tail of others", p99_bare[1], "%"),
        Row.told(
            f"{name}: p95, p90 of errors, by a fitted distribution",
            _spread(fitted, "p95", 100)[1],
            "%",
        ),
        Row.told(
            f"{name}: median-centred KS between random halves of one run",
            _spread(floor, "centred_ks")[0],
        ),
        Row.at_most(
            f"{name}: p95, median error, better than a point mass",
            p95[0],
            float(np.median(point)) * 100,
            "%",
        ),
        Row.at_most(f"{name}: median-centred KS, better than Normal(MAD)", ks[0], ks_normal),
    ]


def scale_rows(runs: list[MlperfRun]) -> list[Row]:
    """Compare forecasts from one run with runs at another scale whose median is known."""
    rows = []
    for bench, label in (("llama31_405b", "405B"), ("gpt3", "GPT-3")):
        own = [r for r in runs if r.bench == bench]
        pairs = [(a, b) for a, b in itertools.permutations(own, 2) if _rescaled(a, b)]
        ours = _across(pairs, carry_over)
        plain = _across(pairs, lambda steps, median: steps * (median / np.median(steps)))
        name = f"MLPerf {label} across scales ({len(pairs)} pairs)"
        ks, p95 = _spread(ours, "ks")[0], _spread(ours, "p95", 100)[0]
        ks_plain, p95_plain = _spread(plain, "ks")[0], _spread(plain, "p95", 100)[0]
        is_405b = bench == "llama31_405b"
        rows += [
            Row.at_most(f"{name}: KS, median", ks, 0.15 if is_405b else min(0.235, ks_plain)),
            Row.at_most(
                f"{name}: p95, median error", p95, 0.5 if is_405b else min(1.0, p95_plain), "%"
            ),
            Row.told(f"{name}: KS of rescaling by the median", ks_plain),
            Row.told(f"{name}: p95 error of rescaling by the median", p95_plain, "%"),
        ]
    return rows


def _repeats(a: MlperfRun, b: MlperfRun) -> bool:
    return a.configuration == b.configuration


def _with_borrowed_tail(run: MlperfRun, runs: Iterable[MlperfRun]) -> Floats:
    """Return the forecast of ``run``. Nothing from its repeat runs is in it."""
    others = [r.steps_ns / np.median(r.steps_ns) for r in runs if not _repeats(r, run)]
    return borrowed_tail(run.steps_ns, others).sorted_ns


def _all_repeats(run: MlperfRun, runs: Iterable[MlperfRun]) -> Floats:
    return np.concatenate([r.steps_ns for r in runs if _repeats(r, run)])


def _rescaled(a: MlperfRun, b: MlperfRun) -> bool:
    return a.family == b.family and a.n_gpus != b.n_gpus


def _across(
    pairs: list[tuple[MlperfRun, MlperfRun]], rule: Callable[[Floats, float], Floats]
) -> list[Agreement]:
    return [agreement(rule(a.steps_ns, float(np.median(b.steps_ns))), b.steps_ns) for a, b in pairs]


def _floor(runs: Iterable[MlperfRun]) -> Iterator[Agreement]:
    for run in runs:
        for a, b in random_halves(len(run.steps_ns), splits=2, seed=0):
            yield agreement(run.steps_ns[a], run.steps_ns[b])


def _robust_normal(steps_ns: Floats) -> Floats:
    median = np.median(steps_ns)
    std = 1.4826 * np.median(np.abs(steps_ns - median))
    drawn = np.random.default_rng(0).normal(median, std, len(QUANTILES))
    return np.asarray(drawn)


def _spread(found: list[Agreement], name: str, times: float = 1.0) -> tuple[float, float]:
    """Return the median and the 90th percentile of the absolute values."""
    values = np.abs([getattr(a, name) for a in found]) * times
    return float(np.median(values)), float(np.quantile(values, 0.9))
