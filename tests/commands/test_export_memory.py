"""``prismscale export memory``: a captured rank's memory for torch's own viewer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from support.explored_program import NULL, write_explored
from support.runs import prismscale, results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small language model."""
    folder = tmp_path_factory.mktemp("run")
    done = prismscale("run", *NULL, "--out", folder, write_explored(folder.parent / "program"))
    assert done.code == 0, done.err
    return folder


def test_the_snapshot_holds_what_the_run_says(run: Path, tmp_path: Path) -> None:
    """Its events lead to the run's peak, its segments are what the allocator reserved, and torch's
    viewer reads it."""
    done = prismscale("export", "memory", run, "--out", tmp_path / "memory.pickle")
    assert done.code == 0, done.err
    found: dict[str, Any] = pickle.loads((tmp_path / "memory.pickle").read_bytes())

    (stage,) = results(run)["stages"]
    assert sum(s["total_size"] for s in found["segments"]) == stage["reserved_bytes"]
    (events,) = found["device_traces"]
    sizes = {"alloc": 1, "free_requested": -1}
    held, most = 0, 0
    for event in events:
        held += sizes.get(event["action"], 0) * event["size"]
        most = max(most, held)
    assert most == pytest.approx(stage["peak_bytes"], rel=0.01)  # without the rounding of blocks
    assert "layouts.py" in str(events)
    assert _memory_viz.segsum(found)
    assert "<html" in _memory_viz.trace_plot(found).lower()


def test_a_rank_that_was_not_captured_is_refused(run: Path, tmp_path: Path) -> None:
    """With those that were."""
    done = prismscale("export", "memory", run, "--rank", 99, "--out", tmp_path / "memory.pickle")

    assert done.code == 2
    assert "captured ranks are 0" in done.err
