"""``prismscale export tensorboard``: a run's figures by torchtitan's tags, read by TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.report.folder import write_report
from prismscale.runfolder import RunFolder
from support.report_job import report_run
from support.runs import prismscale

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With two live ranks, and no null device: neither tokens nor memory of a GPU."""
    folder = tmp_path / "run"
    write_report(RunFolder(root=folder), *report_run())
    return folder


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard reads them."""
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_step_is_logged_as_torchtitan_does(run: Path, tmp_path: Path) -> None:
    """The predicted one as often as asked, in seconds; with what the user says of tokens, tokens
    a second of one GPU."""
    out = tmp_path / "board"
    options = ("--steps", "3", "--tokens-per-step", "32768")
    done = prismscale("export", "tensorboard", run, "--out", out, *options)
    assert done.code == 0, done.err
    result, timeline, _ = report_run()

    found = scalars(out / "predicted")
    step_s = timeline.step_ns / 1e9
    assert [step for step, _ in found["time_metrics/end_to_end(s)"]] == [1, 2, 3]
    assert found["time_metrics/end_to_end(s)"][0][1] == pytest.approx(result.step_ns / 1e9)
    assert found["throughput(tps)"][2][1] == pytest.approx(32768 / 32 / step_s, rel=0.02)


def test_live_ranks_have_a_series_of_their_own(run: Path, tmp_path: Path) -> None:
    """Each of its observed steps."""
    out = tmp_path / "board"
    assert prismscale("export", "tensorboard", run, "--out", out).code == 0
    result, _, _ = report_run()

    live = result.live[0]
    found = scalars(out / f"live-rank-{live.rank}")["time_metrics/end_to_end(s)"]
    assert [value for _, value in found] == pytest.approx([ns / 1e9 for ns in live.step_ns])
