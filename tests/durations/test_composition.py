"""The kinds of kernels that a null run's durations consist of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prismscale.cost.launch_log import STATED, LaunchLog, load_launch_log, save_launch_log
from prismscale.durations.composition import Composition, compositions
from prismscale.durations.recosting import Recosting, launches_path
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.runfolder import RunFolder
from support.null_run import COSTS, H100, stored_null_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A stored null run of two stages, whose computations are all matrix products."""
    return stored_null_run(tmp_path / "null")


def told(root: Path) -> tuple[JobGraph, tuple[Composition, ...]]:
    """Its graph, and the composition of each class."""
    model = COSTS.model(H100.device)
    recosting = Recosting(captures=root / "captures" / "abc", model=model, stored_model=model)
    graph = load_graph(RunFolder(root=root).graph)
    return graph, compositions(graph, recosting)


def unlaunched(log: LaunchLog, each_ns: int) -> LaunchLog:
    """A log of as much work that launches nothing, as the body of such a trace has it."""
    stated = replace(
        log,
        signature_E=np.full(log.n_entries, STATED, np.int32),
        stated_ns_E=np.full(log.n_entries, each_ns, np.int64),
    )
    stop = int(log.node_N[-1]) + 1
    return stated.for_trace(prologue_stop=0, body_start=0, body_stop=stop)


def test_work_of_one_kind_is_all_of_that_kind(root: Path) -> None:
    """Each computation is one matrix product."""
    graph, found = told(root)
    for rank_class, own in zip(graph.classes, found, strict=True):
        assert own.kinds == ("gemm",)
        assert np.array_equal(own.share_BK[:, 0], rank_class.trace.computes_B)


def test_a_rank_that_launches_no_kernel_has_no_kinds(root: Path) -> None:
    """Its body has no shares of any, and the other ranks keep theirs."""
    trace = load_graph(RunFolder(root=root).graph).classes[1].trace
    path = launches_path(root / "captures" / "abc", trace.rank)
    product_ns = int(trace.body_ns_SB[0][trace.computes_B].max())
    save_launch_log(unlaunched(load_launch_log(path), product_ns), path)

    _, (first, second) = told(root)

    assert first.kinds == ("gemm",)
    assert second.kinds == ()
    assert second.share_BK.shape == second.square_BK.shape == (trace.n_body, 0)
