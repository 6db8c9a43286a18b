"""Variability on the command line: which runs take a profile, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from prismscale.config import JobConfig
from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.scenario import Scenario
from prismscale.emulation.script import Script
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.recording import Changes, load_recording
from prismscale.runfolder import RunFolder
from support.forecast_jobs import forecast_app, invoke, recorded_run, small_graph
from support.null_run import COSTS, H100, stored_null_run


@pytest.fixture(scope="module")
def app():
    return forecast_app()


@pytest.fixture
def null_run(tmp_path):
    """A run of two stages on the null device: every computation is one matrix product."""
    return stored_null_run(tmp_path / "null")


def step(root):
    return json.loads((root / "results.json").read_text())["forecast"]["step"]


def test_a_null_run_varies_by_default_and_says_by_what(app, null_run):
    """The profile's name, every source's share, what variation costs, and what differs."""
    text = invoke(app, "forecast", null_run, "--draws", 160, "--executor", "serial")
    found = step(null_run)
    assert "as the profile 'measured' says" in text
    assert {s["name"] for s in found["sources"]} == {
        "temporal",
        "spatial",
        "links",
        "stalls",
        "regimes",
    }
    assert min(found["spread"]["between_cv"], found["spread"]["within_cv"]) > 0.001
    assert 0 < found["variation_cost"] < 0.1
    assert found["training"]["parts_days"]["variation"] > 0
    assert len(found["step_ns"]) == 160


def test_without_variation_a_null_run_has_one_step(app, null_run):
    """To the nanosecond, in every draw and on every command."""
    arguments = ("--variability", "none", "--draws", 3, "--executor", "serial")
    invoke(app, "forecast", null_run, *arguments)
    found = step(null_run)
    assert set(found["step_ns"]) == {found["step_without_variation_ns"]}
    assert found["spread"] is None


def test_another_profile_takes_its_place(app, null_run):
    """By name or file, without another capture."""
    spread = {}
    for name in ("prism-low", "prism-high"):
        invoke(app, "forecast", null_run, "--variability", name, "--draws", 160, "--no-shares")
        spread[name] = step(null_run)["spread"]["between_cv"]
    assert spread["prism-high"] > 4 * spread["prism-low"]


def test_recorded_leaves_the_profile_aside(app, null_run):
    """Then constants apply again, which beside a profile are refused."""
    text = invoke(app, "forecast", null_run, "--variability", "recorded", "--stalls", 0.01)
    assert "varied by 2.0% (assumed), 0.01 of them stalled" in " ".join(text.split())
    with pytest.raises(UsageError, match="--stalls is a constant in place of a profile"):
        invoke(app, "forecast", null_run, "--stalls", 0.01)


def test_sensitivity_and_placement_take_the_profile(app, null_run):
    """Kinds of kernels can be made steady; nodes drawn from the profile are exchanged whole."""
    text = invoke(app, "sensitivity", null_run, "--draws", 80, "--executor", "serial")
    assert "gemm kernels" in text
    text = invoke(app, "place", null_run, "--nodes", "profile", "--ranks-per-node", 4)
    found = json.loads((null_run / "results.json").read_text())["forecast"]["placement"]
    assert [tail["name"] for tail in found["tails"]] == ["given", "best", "worst"]
    assert found["best_ns"] <= found["given_ns"] <= found["worst_ns"]
    slow = (null_run / "placement-best.slow").read_text().split()
    assert len(slow) == len(found["node_slots"]) == 4
    (tail,) = (t for t in found["tails"] if t["name"] == "best")
    asked = Changes(slow={r: s["factor"] for s in found["node_slots"] for r in s["ranks"]})
    assert load_recording(null_run, changes=asked).base.step_ns == tail["step_ns"]


@pytest.mark.parametrize("command", ["forecast", "sensitivity", "place"])
def test_profiles_that_cannot_be_are_refused_everywhere(app, null_run, tmp_path, command):
    """An unknown name, a negative figure, a kind that there is not, what is no TOML."""
    more = ("--nodes", "profile") if command == "place" else ()
    with pytest.raises(UsageError, match=r"unknown variability 'mesured'.*did you mean measured"):
        invoke(app, command, null_run, "--variability", "mesured", *more)
    for text, says in (
        ("[kernels.gemm]\ntemporal_cv = -0.01\n", r"temporal_cv is -0.01; allowed: 0"),
        ("[kernels.gem]\ntemporal_cv = 0.01\n", r"unknown kind of kernel 'gem'"),
        ("[kernels.gemm\n", r"not valid TOML"),
    ):
        path = tmp_path / "odd.toml"
        path.write_text(text)
        with pytest.raises(FormatError, match=says):
            invoke(app, command, null_run, "--variability", path, *more)


def test_what_was_measured_takes_no_profile(app, null_run, tmp_path):
    """An import, and a run whose computation was measured."""
    run = recorded_run(small_graph(), tmp_path / "import")
    with pytest.raises(UsageError, match="an import was measured; allowed are recorded, none"):
        invoke(app, "forecast", run, "--variability", "measured")
    folder = RunFolder(root=null_run)
    replace(Scenario.load(folder.scenario), kernel_costs=None, variability=None).save(
        folder.scenario
    )
    with pytest.raises(UsageError, match="the computation of this run was measured"):
        invoke(app, "forecast", null_run, "--variability", "measured")


def test_a_run_takes_its_clusters_profile_on_the_null_device_alone(tmp_path):
    """Or the one that it is given; a CPU's run has none."""
    asked = {"script": Script(target=__file__), "world_size": 16, "out": tmp_path}
    null = JobConfig(**asked, cluster="h100-sxm", device="null")
    assert null.scenario(H100, "").variability == VariabilityProfile.load("measured")
    other = replace(null, variability="prism-low")
    assert other.scenario(H100, "").variability == VariabilityProfile.load("prism-low")
    assert replace(null, variability="none").scenario(H100, "").variability is None
    cpu = JobConfig(**asked, cluster="h100-sxm")
    assert cpu.scenario(H100, "").variability is None
    with pytest.raises(UsageError, match="was measured"):
        replace(cpu, variability="measured").load_cluster()


def test_a_scenario_keeps_the_whole_profile(tmp_path):
    """What a user's file said stays with the run; files of older versions name none."""
    profile = VariabilityProfile.from_toml('name = "ours"\nnode_share = 0.5\n')
    scenario = Scenario(cluster=H100, kernel_costs=COSTS, variability=profile)
    scenario.save(tmp_path / "scenario.json")
    assert Scenario.load(tmp_path / "scenario.json") == scenario
    table = json.loads((tmp_path / "scenario.json").read_text())
    del table["variability"]
    (tmp_path / "scenario.json").write_text(json.dumps(table))
    assert Scenario.load(tmp_path / "scenario.json").variability is None
