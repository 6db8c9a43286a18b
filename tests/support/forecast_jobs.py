"""Small recorded jobs for the forecast commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer
from typer.testing import CliRunner

from prismscale.commands import forecast as commands
from prismscale.commands.place import place
from prismscale.cost.collective import NullCollectiveModel
from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import save_samples
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.validation.synthetic_job import Layout, PassCosts, build_layout, median_durations

STEPS = 20


def forecast_app() -> typer.Typer:
    """The forecast commands alone."""
    found = typer.Typer(pretty_exceptions_enable=False)
    for command in (commands.forecast, commands.sensitivity, place):
        found.command()(command)
    return found


def small_graph(**kwargs: int) -> JobGraph:
    """Two pipeline stages, of which the last has more work, and two replicas."""
    costs = PassCosts(forward_ns=10**6, backward_ns=2 * 10**6, last_stage_ns=10**6)
    return build_layout(Layout(**{"tp": 1, "pp": 2, "dp": 2, "microbatches": 2, **kwargs}), costs)


def recorded_run(graph: JobGraph, folder: Path, *, slow: Mapping[int, float] | None = None) -> Path:
    """Twenty recorded steps, 5 % noise on computation; with ``slow``, of every rank on its own."""
    base = StepSamples.from_graph(graph)
    rng = np.random.default_rng(0)
    durations = median_durations(graph, NullCollectiveModel())
    classes = []
    for rank_class, own in zip(graph.classes, base.classes, strict=True):
        factor_C = np.ones(1)
        if slow:
            factor_C = np.array([slow.get(r, 1.0) for r in rank_class.members_M.tolist()])
            own = replace(own, column_M=np.arange(rank_class.size))
        kinds = rank_class.trace.kind_N[rank_class.trace.n_prologue :]
        body = []
        for ns, kind in zip(durations.body(rank_class.index, 0), kinds, strict=True):
            width = factor_C if kind == NodeKind.COMPUTE else np.ones(1)
            drawn = rng.normal(1, 0.05, (STEPS, 1)) * width * np.max(ns)
            body.append(np.rint(drawn).astype(np.int64))
        classes.append(replace(own, body_ns=tuple(body)))
    samples = replace(base, step_ids=tuple(range(STEPS)), classes=tuple(classes))
    save_samples(samples, folder / "graph")
    return folder


def invoke(app: typer.Typer, *arguments: object) -> str:
    """What the command prints; it must succeed."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output
