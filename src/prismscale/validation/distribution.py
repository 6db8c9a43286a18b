"""Compares forecast distributions of production traces with the traces' own held-out halves.

Steps are split into random halves: one gives the pools of the forecast, the other is compared with
it. Two halves differ by sampling alone as well, which is the floor. Figures are means over the
splits. Further rows show the effect of each choice of what is drawn together, and check graphs
whose distribution is known exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from prismscale.durations.samples import StepSamples
from prismscale.durations.scenario import NONE
from prismscale.errors import FormatError
from prismscale.forecast.distributions.duration_distribution import (
    Gamma,
    LogNormal,
    Normal,
    ks_distance,
)
from prismscale.forecast.distributions.pools import pools_of
from prismscale.forecast.distributions.scaling import tail_growth, widest_of
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.replay import JointGroup, ReplayDraws, regimes_of
from prismscale.forecast.draws.sampling import DistributionDraws, NodeDistribution
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import Changes, recording_of_import
from prismscale.formats.straggler import read_straggler
from prismscale.formats.straggler.rank_programs import BARRIER_LABEL
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.validation import slow_nodes
from prismscale.validation.goodness import Agreement, agreement, random_halves
from prismscale.validation.rows import Row

NAMES = ("ST", "SE")
SPLITS = 20
SWITCH_SPLITS = 10
DRAWS = 1_500
SEED = 2
EXACT_DRAWS = 100_000
REJECTED_AT_1_PERCENT = 1.63
"""Multiplied by 1/√n, this is the KS distance that n draws from the correct distribution exceed in
one case of a hundred."""

SWITCHES = {
    "all together": JointGroup(),
    "neighbouring microbatches apart": JointGroup(neighbours=False),
    "every node alone": JointGroup(microbatch=False),
    "collectives once for each member": JointGroup(collective=False),
    "no regime": JointGroup(regime=False),
    "all of these off": JointGroup(microbatch=False, collective=False, regime=False),
}


def validate(truth: Path) -> list[Row]:
    """Return all rows of this module, and those of :mod:`.slow_nodes`.

    Args:
        truth: folder of public measurements, with the folder ``straggler``.

    Raises:
        FormatError: files are missing or damaged.
    """
    rows: list[Row] = exact_rows()
    traces = {n: _read(truth, n) for n in NAMES}
    rows += communication_rows(traces.values())
    for name, samples in traces.items():
        rows += distribution_rows(name, samples)
    for name, samples in traces.items():
        rows += switch_rows(name, samples)
    rows += [still_row(name, samples) for name, samples in traces.items()]
    return [*rows, *slow_nodes.validate(traces["ST"], traces["SE"])]


def still_row(name: str, samples: StepSamples) -> Row:
    """Check draws without variation: each must equal the median re-timed step."""
    recording = recording_of_import(samples, Changes())
    model = model_of(recording, variability=NONE)
    config = MonteCarlo(draws=20, steps=model.steps)
    drawn_D = draw_steps(model.graph, model.source, config, base=model.base).step_ns_D
    off = float(np.abs(drawn_D - recording.base.step_ns).max())
    return Row.at_most(f"{name}, variation off: draws less the run's step", off, 0, "ns")


def _read(truth: Path, name: str) -> StepSamples:
    return read_straggler(truth / "straggler" / f"trace-{name}.parquet").samples


def distribution_rows(name: str, samples: StepSamples) -> list[Row]:
    """Compare forecasts from one half of the steps with the other half."""
    ours, floor = compare_halves(samples, JointGroup(), splits=SPLITS)
    ks, ks_floor = _mean(ours, "ks"), _mean(floor, "ks")
    median, median_floor = _mean(ours, "median") * 100, _mean(floor, "median") * 100
    p95 = _mean(ours, "p95") * 100
    what = f"{name} distribution, {SPLITS} splits"
    rows = [
        Row.at_most(f"{what}: KS (floor {ks_floor:.3f})", ks, ks_floor + 0.05),
        Row.at_most(
            f"{what}: median error (floor {median_floor:.2f} %)", median, median_floor + 0.3, "%"
        ),
        Row.told(f"{what}: p95 error between measured halves", _mean(floor, "p95") * 100, "%"),
    ]
    if name == "SE":
        return [*rows, Row.at_most(f"{what}: p95 error", p95, 3.0, "%")]
    # Two of 32 steps decide ST's p95: a half holds none, one or both.
    return [*rows, Row.told(f"{what}: p95 error", p95, "%")]


def switch_rows(name: str, samples: StepSamples) -> list[Row]:
    """Do the same with one thing, or all of :data:`SWITCHES`, no longer drawn together."""
    rows = []
    for label, together in SWITCHES.items():
        ours, _ = compare_halves(samples, together, splits=SWITCH_SPLITS)
        rows += [
            Row.told(f"{name} switches, {label}: KS", _mean(ours, "ks")),
            Row.told(f"{name} switches, {label}: median error", _mean(ours, "median") * 100, "%"),
            Row.told(f"{name} switches, {label}: p95 error", _mean(ours, "p95") * 100, "%"),
        ]
    return rows


def compare_halves(
    samples: StepSamples, together: JointGroup, *, splits: int
) -> tuple[list[Agreement], list[Agreement]]:
    """Compare, for each split, the forecast with the measured other half, and half with half.

    Raises:
        FormatError: the recording does not contain the durations of its steps.
    """
    if samples.observed_step_ns_T is None:
        raise FormatError("the recording does not tell how long its steps took")
    measured_T = samples.observed_step_ns_T.astype(np.float64)
    config = MonteCarlo(draws=DRAWS, steps=1)
    ours, floor = [], []
    for pool, held_out in random_halves(samples.n_steps, splits=splits, seed=SEED):
        half = samples.select(pool.tolist())
        source = ReplayDraws(
            samples=half,
            together=together,
            regime_T=regimes_of(half) if together.regime else None,
        )
        drawn = draw_steps(samples.graph, source, config).step_ns_D.astype(np.float64)
        ours.append(agreement(drawn, measured_T[held_out]))
        floor.append(agreement(measured_T[pool], measured_T[held_out]))
    return ours, floor


def _mean(found: list[Agreement], name: str) -> float:
    return float(np.mean(np.abs([getattr(a, name) for a in found])))


def exact_rows() -> list[Row]:
    """Check graphs whose distribution is known: independent maxima, convolutions."""
    bar = REJECTED_AT_1_PERCENT / np.sqrt(EXACT_DRAWS)
    config = MonteCarlo(draws=EXACT_DRAWS, steps=1)
    work = Normal(mean=1e9, std=5e7)
    barrier = barrier_graph(ranks=64)
    slowest = draw_steps(barrier, _distributions(barrier, work), config).step_ns_D
    chain = serial_graph(kernels=4)
    gamma = Gamma(shape=3.0, scale=1e6)
    summed = draw_steps(chain, _distributions(chain, gamma), config).step_ns_D
    shared = LogNormal(mean_log=14.0, std_log=0.5)
    met = draw_steps(barrier, _distributions(barrier, None, shared), config).step_ns_D
    eighth = barrier_graph(ranks=8)
    grown = tail_growth(draw_steps(eighth, _distributions(eighth, work), config).step_ns_D, [8])[0]
    return [
        Row.at_most(
            "exact distribution, slowest of 64 normal ranks: KS at 1e5 draws",
            ks_distance(widest_of(work, 64), slowest.astype(np.float64)),
            bar,
        ),
        Row.at_most(
            "exact distribution, sum of 4 gamma kernels: KS at 1e5 draws",
            ks_distance(Gamma(shape=12.0, scale=1e6), summed.astype(np.float64)),
            bar,
        ),
        Row.at_most(
            "exact distribution, one collective shared by 64 ranks: KS at 1e5 draws",
            ks_distance(shared, met.astype(np.float64)),
            bar,
        ),
        Row.told(
            "scale rule: p95 of 64 ranks from draws of 8, against draws of 64",
            (grown.p95_ns / float(np.quantile(slowest, 0.95)) - 1) * 100,
            "%",
        ),
    ]


def communication_rows(traces: Iterable[StepSamples]) -> list[Row]:
    """Return the variation of communication without waiting, the default where it is modelled."""
    cvs = [
        pool.temporal_cv
        for samples in traces
        for pool in pools_of(samples)
        if pool.signature.kind != NodeKind.COMPUTE
        and pool.signature.label != BARRIER_LABEL
        and pool.durations_ns.any()
    ]
    name = f"SE and ST, variation of communication over time, {len(cvs)} pools"
    return [
        Row.told(f"{name}: median", float(np.median(cvs)) * 100, "%"),
        Row.told(f"{name}: nine tenths are below", float(np.quantile(cvs, 0.9)) * 100, "%"),
    ]


def barrier_graph(ranks: int) -> JobGraph:
    """Build a graph in which every rank computes once, then all meet in an ``all_reduce``."""
    builder = TraceBuilder(rank=0, world_size=ranks)
    builder.add_compute(1, preds=[-1], label="work")
    builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[0])
    builder.add_compute(0, preds=[1], label="end")
    traces = {0: builder.build()}
    one = np.zeros(ranks, dtype=np.int64)
    return assemble(traces, one, collect_groups(traces, ranks, one))


def serial_graph(kernels: int) -> JobGraph:
    """Build a graph in which one rank runs kernels one after the other."""
    builder = TraceBuilder(rank=0, world_size=1)
    for i in range(kernels):
        builder.add_compute(1, preds=[i - 1], label="work")
    traces = {0: builder.build()}
    one = np.zeros(1, dtype=np.int64)
    return assemble(traces, one, collect_groups(traces, 1, one))


def _distributions(
    graph: JobGraph, work: Gamma | Normal | None, meet: LogNormal | None = None
) -> DistributionDraws:
    """Use ``work`` for nodes with the label ``work``, and ``meet`` for collectives."""
    trace = graph.classes[0].trace
    distribution_of = {
        label: i
        for i, (label, distribution) in enumerate((("work", work), ("all_reduce", meet)))
        if distribution is not None
    }
    labels = [trace.labels[i] for i in trace.label_N.tolist()]
    return DistributionDraws(
        graph=graph,
        distributions=(
            NodeDistribution(name="work", compute=work),
            NodeDistribution(name="meet", communication=meet),
        ),
        distribution_CB=(
            np.array([distribution_of.get(label, -1) for label in labels], dtype=np.int64),
        ),
    )
