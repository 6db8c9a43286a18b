"""Compares steps re-timed from imported straggler traces with the recorded steps.

There are four comparisons for each public trace: every recorded step re-timed from separated
durations; the same with communication and gaps from other steps; one worker per stage, with the
other replicas drawn; and the published effect of launch delays (ByteDance's ``launch_slowdown``:
recorded step time over the step time without gaps).

Array axes: ``T`` steps, ``X`` columns or groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import ClassSamples, StepSamples
from prismscale.durations.source import DurationSource
from prismscale.errors import FormatError
from prismscale.formats.straggler import read_straggler
from prismscale.formats.straggler.rank_programs import BARRIER_LABEL, GAP
from prismscale.graph.node import NodeKind
from prismscale.sim.program import JobProgram, compile_job
from prismscale.sim.timeline import simulate
from prismscale.validation.recorded_draws import ReplicaDraws, pick
from prismscale.validation.rows import Row

NAMES = ("ST", "SE")
DRAWS = 400
SLOW_BY = 1.5
"""Factor that slows down the worker outside the slice, enough to put it on the critical path."""

OTHER_STEPS_BAR = {"ST": 0.5, "SE": 0.1}
SLICE_BAR = {"ST": 0.5, "SE": 3.0}

Edit = Callable[[str, bool, NDArray[np.int64]], NDArray[np.int64]]
"""Maps (label, is communication, durations ``[T, X]``) to the durations to use instead."""


def validate(truth: Path) -> list[Row]:
    """Return all rows of all traces.

    Args:
        truth: folder of public measurements, with ``straggler/trace-NAME.parquet`` and
            ``straggler/result-NAME.json``.

    Raises:
        FormatError: a file is missing or damaged.
    """
    return [row for name in NAMES for row in validate_trace(truth / "straggler", name)]


def validate_trace(folder: Path, name: str) -> list[Row]:
    """Return the rows of one trace, from the folder that holds it."""
    samples = read_straggler(folder / f"trace-{name}.parquet").samples
    program = compile_job(samples.graph)
    return [
        *_replayed(name, samples, program),
        *_published(folder / f"result-{name}.json", name, samples, program),
        *_sliced(name, samples, program),
    ]


def _replayed(name: str, samples: StepSamples, program: JobProgram) -> list[Row]:
    identity = _errors(samples, program)
    own_work = _errors(_edited(samples, _typical_gaps), program)
    foreign = _errors(_edited(samples, _from_other_half), program)
    bar = OTHER_STEPS_BAR[name]
    return [
        Row.at_most(f"{name}: identity replay, largest error", identity.max(), 0.01, "%"),
        Row.at_most(
            f"{name}: per step, gaps typical of other steps, median error",
            float(np.median(own_work)),
            0.05,
            "%",
        ),
        Row.at_most(
            f"{name}: per step, gaps typical of other steps, p90 error",
            float(np.quantile(own_work, 0.9)),
            0.2,
            "%",
        ),
        Row.at_most(
            f"{name}: communication and gaps from the other half, median error",
            float(np.median(foreign)),
            bar,
            "%",
        ),
    ]


def _published(path: Path, name: str, samples: StepSamples, program: JobProgram) -> list[Row]:
    """Compare our slow-downs by launch delay with the published ones, per step and on average."""
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
        per_step = published["launch_step_slowdown"]
        theirs_T = np.array([float(per_step[str(step)]) for step in samples.step_ids])
        average = float(published["launch_slowdown"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: no published slow-downs ({error!r})") from error
    recorded_T = _observed(samples)
    without_T = _step_ns(_edited(samples, _no_gaps), program)
    off_T = _percent(recorded_T / without_T, theirs_T)
    off = abs(recorded_T.mean() / without_T.mean() / average - 1) * 100
    return [
        Row.at_most(f"{name}: published no-delay slow-down, off by", float(off), 0.5, "%"),
        Row.at_most(
            f"{name}: published no-delay slow-down by step, median off by",
            float(np.median(off_T)),
            0.5,
            "%",
        ),
        Row.told(f"{name}: published no-delay slow-down by step, most off by", off_T.max(), "%"),
    ]


def _sliced(name: str, samples: StepSamples, program: JobProgram) -> list[Row]:
    """Take each replica in turn as the slice: one worker per stage recorded, all others drawn."""
    replicas = np.unique(samples.replica_R).tolist()
    recorded = float(np.median(_observed(samples)))
    off = []
    for replica in replicas:
        draws = ReplicaDraws(
            samples=samples, replica=replica, picks=pick(samples, replica, draws=DRAWS, seed=0)
        )
        off.append(abs(_median_ns(samples, program, draws) / recorded - 1) * 100)
    forecast, truth = _slowed(samples, program)
    return [
        Row.at_most(
            f"{name}: one worker a stage, median step, median error over slices",
            float(np.median(off)),
            SLICE_BAR[name],
            "%",
        ),
        Row.told(f"{name}: one worker a stage, median step, worst slice", max(off), "%"),
        Row.at_least(
            f"{name}: worker outside the slice {SLOW_BY} × slower, forecast rises by",
            forecast,
            truth / 2,
            "%",
        ),
        Row.told(f"{name}: the same on the whole trace, step rises by", truth, "%"),
    ]


def _slowed(samples: StepSamples, program: JobProgram) -> tuple[float, float]:
    """Return the rise of the median step, in %, by one slow worker: from a slice, from all."""
    inside, outside = samples.replica_R.min(), samples.replica_R.max()
    last = samples.stage_R.max()
    worker = int(np.flatnonzero((samples.replica_R == outside) & (samples.stage_R == last))[0])
    draws = ReplicaDraws(
        samples=samples,
        replica=int(inside),
        picks=pick(samples, int(inside), draws=DRAWS, seed=0),
    )
    slow = replace(draws, slowdown_R={worker: SLOW_BY})
    forecast = _median_ns(samples, program, slow) / _median_ns(samples, program, draws)
    whole = np.median(_step_ns(_with_slow(samples, worker), program)) / np.median(
        _step_ns(samples, program)
    )
    return (forecast - 1) * 100, float(whole - 1) * 100


def _with_slow(samples: StepSamples, worker: int) -> StepSamples:
    index = int(samples.graph.class_of_R[worker])
    member = int(samples.graph.member_of_R[worker])
    trace = samples.graph.classes[index].trace
    own = samples.classes[index]
    body = []
    for node, ns_TX in enumerate(own.body_ns):
        slow = ns_TX.copy()
        if trace.kind_N[trace.n_prologue + node] == NodeKind.COMPUTE:
            slow[:, member] = np.rint(slow[:, member] * SLOW_BY)
        body.append(slow)
    classes = list(samples.classes)
    classes[index] = replace(own, body_ns=tuple(body))
    return replace(samples, classes=tuple(classes))


def _edited(samples: StepSamples, edit: Edit) -> StepSamples:
    classes: list[ClassSamples] = []
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        trace = rank_class.trace
        nodes = range(trace.n_prologue, trace.n_nodes)
        body = tuple(
            edit(trace.labels[int(trace.label_N[i])], bool(trace.kind_N[i]), ns_TX)
            for i, ns_TX in zip(nodes, own.body_ns, strict=True)
        )
        classes.append(replace(own, body_ns=body))
    return replace(samples, classes=tuple(classes))


def _typical_gaps(
    label: str, is_communication: bool, ns_TX: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Replace each gap by the *other* steps' median, so that a step's own end does not leak in."""
    if label != GAP or len(ns_TX) < 2:
        return ns_TX
    rest = [np.median(np.delete(ns_TX, t, axis=0), axis=0) for t in range(len(ns_TX))]
    return np.rint(rest).astype(np.int64)


def _from_other_half(
    label: str, is_communication: bool, ns_TX: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Give even steps the median communication and gaps of odd steps, and the reverse."""
    if not (is_communication or label == GAP) or len(ns_TX) < 2:
        return ns_TX
    halves = np.rint([np.median(ns_TX[1::2], axis=0), np.median(ns_TX[0::2], axis=0)])
    return halves.astype(np.int64)[np.arange(len(ns_TX)) % 2]


def _no_gaps(label: str, is_communication: bool, ns_TX: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.zeros_like(ns_TX) if label in (GAP, BARRIER_LABEL) else ns_TX


def _errors(samples: StepSamples, program: JobProgram) -> NDArray[np.float64]:
    return _percent(_step_ns(samples, program), _observed(samples))


def _percent(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.abs(ours / theirs - 1) * 100, dtype=np.float64)


def _step_ns(samples: StepSamples, program: JobProgram) -> NDArray[np.float64]:
    steps = range(samples.n_steps)
    return np.array([_simulated(samples, program, samples.durations(t)) for t in steps])


def _simulated(samples: StepSamples, program: JobProgram, durations: DurationSource) -> float:
    return float(simulate(samples.graph, durations, steps=1, program=program).step_ns)


def _median_ns(samples: StepSamples, program: JobProgram, durations: DurationSource) -> float:
    timeline = simulate(samples.graph, durations, steps=1, draws=DRAWS, program=program)
    return float(np.median(timeline.step_ns_D))


def _observed(samples: StepSamples) -> NDArray[np.float64]:
    if samples.observed_step_ns_T is None:
        raise FormatError("the trace does not tell how long its steps took")
    return samples.observed_step_ns_T.astype(np.float64)
