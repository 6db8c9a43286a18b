"""``prismscale import``: foreign traces become a run folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prismscale.commands.exports import exports
from prismscale.commands.imports import imports
from prismscale.durations.samples_io import load_samples
from prismscale.errors import UsageError
from prismscale.formats.chakra import write_chakra
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, pipeline_job
from support.kineto_traces import two_ranks
from support.straggler_traces import make_rows, write


def run(*arguments: object) -> str:
    result = CliRunner().invoke(imports, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_straggler_trace_becomes_a_run(tmp_path: Path) -> None:
    """Steps are stored, and re-timing them gives what was recorded."""
    trace = write(make_rows(), tmp_path / "trace-X.parquet")
    text = run("straggler", trace, "--out", tmp_path / "run")
    assert "4 ranks in 2 classes" in text
    assert "most off by 0.0000 %" in text
    assert load_samples(tmp_path / "run" / "graph").n_steps == 6


def test_kineto_traces_become_a_run(tmp_path: Path) -> None:
    """One file a rank."""
    run("kineto", *two_ranks(tmp_path), "--out", tmp_path / "run")
    assert load_samples(tmp_path / "run" / "graph").graph.world_size == 2


def test_chakra_traces_become_a_run(tmp_path: Path) -> None:
    """What we exported can be imported."""
    graph = pipeline_job(2, 1, 1, 2)
    recorded = RecordedDurations(graph)
    timeline = simulate(graph, recorded, ranks=[0, 1])
    paths = write_chakra(graph, timeline, recorded, tmp_path)
    run("chakra", *paths, "--out", tmp_path / "run")
    assert load_samples(tmp_path / "run" / "graph").graph.world_size == 2


def test_trace_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A wrong path is the user's to mend."""
    with pytest.raises(UsageError, match="no such file"):
        run("straggler", tmp_path / "nothing.parquet", "--out", tmp_path / "run")


def test_a_run_is_exported_and_imported_again(tmp_path: Path) -> None:
    """Chakra both ways: the step takes as long, to the nanosecond."""
    trace = write(make_rows(), tmp_path / "trace-X.parquet")
    run("straggler", trace, "--out", tmp_path / "run")
    arguments = ["chakra", str(tmp_path / "run"), "--out", str(tmp_path / "et")]
    said = CliRunner().invoke(exports, arguments, catch_exceptions=False).output
    text = run("chakra", *sorted((tmp_path / "et").glob("*.et")), "--out", tmp_path / "back")
    step = re.search(r"a step of ([\d,.]+) ms", said)
    assert step is not None
    assert f"median {step[1]} ms" in text


def test_export_of_ranks_that_are_not_there_is_refused(tmp_path: Path) -> None:
    """The ranks that there are are named."""
    trace = write(make_rows(), tmp_path / "trace-X.parquet")
    run("straggler", trace, "--out", tmp_path / "run")
    arguments = ["chakra", str(tmp_path / "run"), "--out", str(tmp_path), "--ranks", "9"]
    with pytest.raises(UsageError, match="0 … 3"):
        CliRunner().invoke(exports, arguments, catch_exceptions=False)
