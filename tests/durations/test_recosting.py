"""Durations that a run stored and durations at other costs are of the same prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prismscale.durations.altered import Alteration
from prismscale.durations.recosting import trace_path
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.graph.io import load_graph, load_trace, save_trace
from prismscale.graph.job_graph import JobGraph
from prismscale.runfolder import RunFolder
from support.null_run import stored_null_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A stored null run."""
    return stored_null_run(tmp_path / "null")


def costed(root: Path, *what_ifs: str) -> JobGraph:
    """Its graph with what-ifs."""
    folder = RunFolder(root=root)
    scenario = replace(Scenario.load(folder.scenario), what_ifs=what_ifs)
    return Alteration(scenario=scenario, root=root).costed(load_graph(folder.graph))


def price_differently(root: Path, factor: float) -> None:
    """The captures as prices of another version would have made them."""
    for trace in {
        id(c.trace): c.trace for c in load_graph(RunFolder(root=root).graph).classes
    }.values():
        path = trace_path(root / "captures" / "abc", trace.rank)
        stored = load_trace(path)
        body_ns_SB = np.where(stored.computes_B, stored.body_ns_SB * factor, stored.body_ns_SB)
        save_trace(replace(stored, body_ns_SB=body_ns_SB.astype(np.int64)), path)


def test_kernels_as_they_are_cost_what_is_stored(root: Path) -> None:
    """A factor of next to nothing changes no duration."""
    stored = load_graph(RunFolder(root=root).graph)
    for before, after in zip(
        stored.classes, costed(root, "kernel=gemm x1.0000000001").classes, strict=True
    ):
        assert np.array_equal(before.trace.body_ns_SB, after.trace.body_ns_SB)


def test_a_run_of_other_prices_is_not_costed_anew(root: Path) -> None:
    """Its step would be held against one by today's prices; the message says how far they are
    apart, and how to mend it."""
    price_differently(root, 0.8)
    with pytest.raises(UsageError, match=r"\+25\.\d+%.*--fresh"):
        costed(root, "kernel=gemm x0.9")


def test_a_run_of_other_prices_is_read_as_it_is(root: Path) -> None:
    """Where nothing is costed, what it stored is all there is."""
    price_differently(root, 0.8)
    assert costed(root) is not None
    assert costed(root, "link=nvlink x2") is not None


def test_a_run_whose_traces_are_gone_is_refused(root: Path) -> None:
    """By which prices it was captured is not known then."""
    for path in root.rglob("rank-*.parquet"):
        path.unlink()
    with pytest.raises(UsageError, match="rank-"):
        costed(root, "kernel=gemm x0.9")
