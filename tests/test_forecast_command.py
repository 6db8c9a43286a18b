"""The forecast commands, on a small recorded job."""

import json
from dataclasses import replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from prismscale.commands import forecast as commands
from prismscale.cost.collective import NullCollectiveModel
from prismscale.errors import UsageError
from prismscale.forecast.layout import Layout, PassCosts, build_layout, median_durations
from prismscale.forecast.recording import load_recording, model_of
from prismscale.forecast.samples import StepSamples
from prismscale.graph.store import save_graph
from prismscale.sim.samples_store import save_samples

STEPS = 20


@pytest.fixture(scope="module")
def app():
    found = typer.Typer(pretty_exceptions_enable=False)
    for command in (commands.forecast, commands.sensitivity, commands.place, commands.explore):
        found.command()(command)
    return found


@pytest.fixture(scope="module")
def graph():
    costs = PassCosts(
        forward_ns=10**6, input_gradient_ns=10**6, weight_gradient_ns=10**6, last_stage_ns=10**6
    )
    return build_layout(Layout(tp=1, pp=2, dp=2, microbatches=2), costs)


@pytest.fixture
def run(graph, tmp_path):
    """Twenty recorded steps, 5 % noise on computation."""
    base = StepSamples.from_graph(graph)
    rng = np.random.default_rng(0)
    durations = median_durations(graph, NullCollectiveModel())
    classes = []
    for rank_class, own in zip(graph.classes, base.classes, strict=True):
        body = [
            np.rint(rng.normal(1, 0.05, (STEPS, 1)) * np.max(ns)).astype(np.int64)
            for ns in durations.body(rank_class.index, 0)
        ]
        classes.append(replace(own, body_ns=tuple(body)))
    samples = replace(base, step_ids=tuple(range(STEPS)), classes=tuple(classes))
    save_samples(samples, tmp_path / "run" / "graph")
    return tmp_path / "run"


def invoke(app, *arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_forecast_states_quantiles_and_days(app, run):
    """On the terminal and for machines, the same figures; the same seed repeats them."""
    arguments = ("forecast", run, "--draws", 200, "--quantile", 0.9, "--executor", "serial")
    text = invoke(app, *arguments)
    first = json.loads((run / "forecast.json").read_text())["forecast"]
    invoke(app, *arguments)
    assert "p90" in text
    assert "days" in text
    assert first == json.loads((run / "forecast.json").read_text())["forecast"]
    assert first["quantiles_ns"]["0.5"]["value"] == pytest.approx(1.5e7, rel=0.05)


def test_sensitivity_ranks_and_keeps_the_forecast(app, run):
    """Each command writes its own section."""
    invoke(app, "forecast", run, "--draws", 50, "--executor", "serial")
    arguments = ("--draws", 50, "--executor", "serial", "--method", "laws")
    text = invoke(app, "sensitivity", run, *arguments)
    written = json.loads((run / "forecast.json").read_text())
    gains = [a["p95_gain"] for a in written["sensitivity"]["ablations"]]
    assert gains == sorted(gains, reverse=True)
    assert "forecast" in written
    report = (run / "report.html").read_text()
    assert all(part in report for part in ("forecast-density", "forecast-tornado"))
    assert "backward" in text


def test_placement_moves_a_slow_node_off_the_loaded_stage(app, run, tmp_path):
    """The slow node first sits on the last stage, and then does not."""
    (tmp_path / "nodes.csv").write_text("node,factor\na,1\nslow,1.4\nc,1\nd,1\n")
    invoke(app, "place", run, "--nodes", tmp_path / "nodes.csv")
    found = json.loads((run / "forecast.json").read_text())["placement"]
    slow = next(s for s in found["seats"] if s["node"] == "slow")
    assert slow["ranks"][0] < 2
    assert found["best_ns"] < found["given_ns"]
    assert "forecast-placement" in (run / "report.html").read_text()


def test_explore_prints_every_layout(app, tmp_path):
    """Possible layouts with figures, impossible ones with a reason."""
    (tmp_path / "job.toml").write_text(
        "world_size = 8\nlayers = 4\nglobal_batch = 16\nmicro_batch = 1\n"
        "[costs]\nforward_ns = 1e6\ninput_gradient_ns = 1e6\nweight_gradient_ns = 1e6\n"
        "[bytes]\nboundary = 1000\ngradients = 1000\nstate = 1000\nactivations = 1000\n"
    )
    arguments = ("--pp", "2,8", "--draws", 20, "--executor", "serial")
    text = invoke(app, "explore", tmp_path / "job.toml", *arguments)
    assert "PP2" in text
    assert "do not" in text


def test_communication_that_was_not_measured_needs_a_cluster(graph, tmp_path):
    """A captured graph has no communication times: they come from the cluster's model, or not."""
    save_graph(graph, tmp_path / "graph")
    with pytest.raises(UsageError, match="--cluster"):
        load_recording(tmp_path, None)
    recording = load_recording(tmp_path, "h100-sxm")
    assert "h100-sxm" in recording.notes[0]


def test_few_steps_are_extended_by_laws(run):
    """Twenty steps are recombined; with four, laws are fitted."""
    recording = load_recording(run, None)
    assert not model_of(recording).fitted
    assert model_of(replace(recording, samples=recording.samples.select(range(4)))).fitted
    with pytest.raises(UsageError, match="allowed: auto, steps, laws"):
        model_of(recording, method="guess")
