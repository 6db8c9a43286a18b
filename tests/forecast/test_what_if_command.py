"""``prismscale what-if`` on a captured job and on an import: tables, results and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

import prismscale as ps
from prismscale.cluster import Cluster
from prismscale.commands.what_if.what_if_command import what_if
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.forecast.recording import Changes, load_recording
from prismscale.graph.io import save_graph
from prismscale.report.folder import read_results, write_report
from prismscale.runfolder import RunFolder
from support.forecast_jobs import forecast_app, invoke, recorded_run, small_graph
from support.jobs import pipeline_job
from support.report_job import report_run

FEW = ("--draws", 20, "--executor", "serial")


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    """The command, and its neighbours."""
    found = forecast_app()
    found.command("what-if")(what_if)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A captured pipeline of six stages, whose communication was measured."""
    folder = RunFolder(root=tmp_path / "run")
    save_graph(pipeline_job(6, 2, 1, 6, samples=3), folder.graph)
    Scenario(cluster=Cluster.load("h100-sxm")).save(folder.scenario)
    return folder.root


def section(run: Path) -> dict[str, Any]:
    """What the command left."""
    found: dict[str, Any] = json.loads((run / "results.json").read_text())
    part: dict[str, Any] = found["forecast"]["what_if"]
    return part


def test_both_sides_stand_beside_each_other(app: typer.Typer, run: Path) -> None:
    """On the terminal and in the results: steps, exposed communication, stages, quantiles."""
    text = invoke(app, "what-if", run, "kernel=backward x0.5", *FEW)
    found = section(run)
    before, after = found["before"], found["after"]
    assert before["step_ns"] == load_recording(run).base.step_ns
    changed = load_recording(run, changes=Changes(what_ifs=("kernel=backward x0.5",)))
    assert after["step_ns"] == changed.base.step_ns < before["step_ns"]
    assert before["quantiles_ns"].keys() == {"0.5", "0.95"}
    assert after["quantiles_ns"]["0.95"] < before["quantiles_ns"]["0.95"]
    backward = [s["breakdown"]["compute_ns"]["backward"] for s in before["stages"]]
    halved = [s["breakdown"]["compute_ns"]["backward"] for s in after["stages"]]
    assert halved == [pytest.approx(ns / 2, rel=1e-3) for ns in backward]
    assert found["what_ifs"][0]["touches"] == "backward 12 computations a step"
    assert "kernel=backward x0.5" in text
    assert "stage 0" in text
    assert "stage 5" in text
    assert "4 stages between these" in text


def test_each_what_if_is_told_alone(app: typer.Typer, run: Path) -> None:
    """Beside what they do together."""
    texts = ("kernel=forward x2", "kernel=backward x0.5")
    invoke(app, "what-if", run, *texts, *FEW)
    alone = [row["alone_step_ns"] for row in section(run)["what_ifs"]]
    assert alone == [
        load_recording(run, changes=Changes(what_ifs=(text,))).base.step_ns for text in texts
    ]
    assert alone[0] > section(run)["before"]["step_ns"] > alone[1]


def test_without_variation_the_quantiles_are_the_step(app: typer.Typer, run: Path) -> None:
    """On both sides."""
    invoke(app, "what-if", run, "kernel=forward x2", *FEW, "--variability", "none")
    for side in (section(run)["before"], section(run)["after"]):
        assert set(side["quantiles_ns"].values()) == {side["step_ns"]}


def test_the_report_shows_all_stages(app: typer.Typer, tmp_path: Path) -> None:
    """In a section of its own, which the other commands leave in place."""
    folder = RunFolder(root=tmp_path / "run")
    result, timeline, durations = report_run(live=False, pp=6)
    folder.root.mkdir()
    save_graph(durations.graph, folder.graph)
    Scenario(cluster=Cluster.load("h100-sxm")).save(folder.scenario)
    write_report(folder, result, timeline, durations)
    invoke(app, "what-if", folder.root, "kernel=forward x2", *FEW)
    invoke(app, "forecast", folder.root, *FEW)
    page = folder.report.read_text()
    assert "kernel=forward x2" in page
    assert all(f"stage {n}, " in page for n in range(6))


def test_an_import_answers_with_its_own_steps(app: typer.Typer, tmp_path: Path) -> None:
    """Labels of its computation; measured communication keeps its links."""
    folder = recorded_run(small_graph(), tmp_path / "import")
    invoke(app, "what-if", folder, "kernel=forward.* x3", *FEW)
    found = section(folder)
    assert found["after"]["step_ns"] > 1.2 * found["before"]["step_ns"]
    with pytest.raises(UsageError, match="holds an import, and no run"):
        read_results(RunFolder(root=folder))
    with pytest.raises(UsageError, match="with --cluster"):
        load_recording(folder, changes=Changes(what_ifs=("link=nvlink x2",)))
    for shared in ("links=shared", "compute=shared"):
        with pytest.raises(UsageError, match="hold already what"):
            load_recording(folder, changes=Changes(what_ifs=(shared,)))
    with pytest.raises(UsageError, match="run the program with --device null"):
        load_recording(folder, changes=Changes(what_ifs=("recompute=off",)))
    with pytest.raises(UsageError, match="it is called"):
        load_recording(folder, changes=Changes(what_ifs=("kernel=mm x2",)))


def test_unmeasured_communication_of_an_import_takes_other_links(tmp_path: Path) -> None:
    """Where a cluster's model answers."""
    folder = recorded_run(small_graph(), tmp_path / "import")
    asked = Changes(cluster="h100-sxm", what_ifs=("link=nvlink x0.01",))
    (effect,) = load_recording(folder, changes=asked).effects
    assert effect.count > 0


def test_python_has_the_same_figures(run: Path) -> None:
    """Without a terminal."""
    (run / "results.json").write_text("{}")
    found = ps.load(run).what_if("kernel=backward x0.5", draws=5)
    changed = load_recording(run, changes=Changes(what_ifs=("kernel=backward x0.5",)))
    assert found.after.step_ns == changed.base.step_ns
    drawn = ps.load(run).forecast(what_ifs=["kernel=backward x0.5"], variability="none", draws=2)
    assert drawn.base_ns == found.after.step_ns
    with pytest.raises(UsageError, match="no what-if is given"):
        ps.load(run).what_if()
