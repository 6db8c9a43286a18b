"""One job from the command line to its report: the DDP example at world size 16, rank 0 live."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prismscale.analysis.result import RunResult
from prismscale.graph.io import load_graph
from prismscale.graph.verify import verify
from support.runs import Ended, prismscale, results

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp" / "train.py"
WORLD, HIDDEN, LAYERS = 16, 32, 2
PARAMETERS = (LAYERS + 1) * (HIDDEN * HIDDEN + HIDDEN)
RUN = ["--world-size", WORLD, "--live", 0, "--samples", 2, "--steps", 2]
PROGRAM = [EXAMPLE, "--hidden", HIDDEN, "--layers", LAYERS, "--steps", 100]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    out = tmp_path_factory.mktemp("job") / "run"
    done = prismscale("run", *RUN, "--out", out, *PROGRAM)
    assert done.code == 0, done.err
    return out, done


@pytest.fixture(scope="module")
def found(run: tuple[Path, Ended]) -> Mapping[str, Any]:
    return results(run[0])


def test_the_summary_and_the_scripts_own_log_are_shown(run: tuple[Path, Ended]) -> None:
    """A person reads the step time; the script's lines stay what they are."""
    assert re.search(r"^ Step +\d", run[1].out, re.MULTILINE)
    assert "[rank 0] step    1  loss" in run[1].out


def test_the_results_are_readable_by_their_schema(found: Mapping[str, Any]) -> None:
    """What was written is what the reader of results takes."""
    result = RunResult.from_json(found)
    assert (result.world_size, result.device, result.hung) == (WORLD, "cpu", False)
    assert result.step_ns > 0


def test_all_ranks_are_of_one_class_that_was_witnessed(found: Mapping[str, Any]) -> None:
    """First, second, middle and last rank were captured and found equal."""
    assert found["captured"] == [0, 1, 8, 15]
    assert found["witnesses"] == [1, 8, 15]
    assert [(c["ranks"], c["assumed"]) for c in found["classes"]] == [(16, 12)]


def test_the_graph_is_legal_and_reduces_every_gradient(run: tuple[Path, Ended]) -> None:
    """The buckets of one step hold all parameters once."""
    graph = load_graph(run[0] / "graph")
    verify(graph)
    trace = graph.classes[0].trace
    body = trace.communications(trace.n_prologue, trace.n_nodes)
    assert sum(int(trace.bytes_N[n]) for n in body) == 4 * PARAMETERS


def test_the_live_rank_ran_and_peaked_like_the_capture(found: Mapping[str, Any]) -> None:
    """Its memory is that of the captured ranks, to the byte."""
    (peak,) = {s["peak_bytes"] for s in found["stages"]}
    assert [(r["rank"], r["peak_bytes"]) for r in found["live"]] == [(0, peak)]
    assert peak > 4 * PARAMETERS


def test_every_stage_is_accounted_for(found: Mapping[str, Any]) -> None:
    """Wall time by stage, and memory of all processes together."""
    assert set(found["wall_s"]) == {"capture", "assemble", "simulate", "forecast", "live"}
    assert found["peak_rss_bytes"] > 100 << 20


def test_the_folder_holds_report_trace_and_timeline(run: tuple[Path, Ended]) -> None:
    """And says so."""
    for name in ("report.html", "trace.perfetto-trace", "timeline.parquet", "results.json"):
        assert (run[0] / name).stat().st_size > 0
        assert name in run[1].out


def test_finished_stages_are_reused(run: tuple[Path, Ended], found: Mapping[str, Any]) -> None:
    """The same command again captures nothing, runs nobody, and finds the same."""
    done = prismscale("run", *RUN, "--out", run[0], *PROGRAM)
    again = results(run[0])
    assert done.code == 0
    assert again["step_ns"] == found["step_ns"]
    assert again["live"] == found["live"]
    assert "[rank 0]" not in done.out


UNEVEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
held = torch.zeros((1 + dist.get_rank()) << 18)
for step in range(40):
    layer(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(layer.weight.grad)
    optimizer.step()
"""


def test_the_peak_is_that_of_the_captured_rank_that_holds_most(tmp_path: Path) -> None:
    """Not the representative's: here a witness has the larger shard."""
    script = tmp_path / "train.py"
    script.write_text(UNEVEN)
    done = prismscale("run", "--world-size", 4, "--samples", 2, "--out", tmp_path / "run", script)
    assert done.code == 0, done.err
    (stage,) = results(tmp_path / "run")["stages"]
    assert 4 << 20 <= stage["peak_bytes"] < 5 << 20
