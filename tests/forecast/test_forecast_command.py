"""The forecast commands, on a small recorded job."""

import json
from dataclasses import replace

import pytest

from prismscale.cluster import Cluster
from prismscale.durations.scenario import Scenario
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.variation import Variation
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import load_recording
from prismscale.graph.io import save_graph
from prismscale.report.folder import read_run, write_report
from prismscale.runfolder import RunFolder
from support.forecast_jobs import forecast_app, invoke, recorded_run, small_graph
from support.report_job import report_run


@pytest.fixture(scope="module")
def app():
    return forecast_app()


@pytest.fixture(scope="module")
def graph():
    return small_graph()


@pytest.fixture
def run(graph, tmp_path):
    return recorded_run(graph, tmp_path / "run")


def written(run):
    return json.loads((run / "results.json").read_text())["forecast"]


def test_a_forecast_states_quantiles_and_days(app, run):
    """On the terminal and for machines, the same figures; the same seed repeats them."""
    arguments = ("forecast", run, "--draws", 200, "--quantile", 0.9, "--executor", "serial")
    text = invoke(app, *arguments)
    first = written(run)["step"]
    invoke(app, *arguments)
    assert "p90" in text
    assert "days" in text
    assert first == written(run)["step"]
    assert first["quantiles_ns"]["0.5"]["value"] == pytest.approx(1.5e7, rel=0.05)


def test_sensitivity_ranks_and_keeps_the_forecast(app, run):
    """Each command writes its own section."""
    invoke(app, "forecast", run, "--draws", 50, "--executor", "serial")
    arguments = ("--draws", 50, "--executor", "serial", "--method", "fitted")
    text = invoke(app, "sensitivity", run, *arguments)
    gains = [a["p95_gain"] for a in written(run)["sensitivity"]["ablations"]]
    assert gains == sorted(gains, reverse=True)
    assert "step" in written(run)
    report = (run / "report.html").read_text()
    assert all(part in report for part in ("forecast-density", "forecast-tornado"))
    assert "backward" in text


def test_placement_moves_a_slow_node_off_the_loaded_stage(app, run, tmp_path):
    """The slow node first sits on the last stage, and then does not."""
    (tmp_path / "nodes.csv").write_text("node,factor\na,1\nslow,1.4\nc,1\nd,1\n")
    invoke(app, "place", run, "--nodes", tmp_path / "nodes.csv")
    found = written(run)["placement"]
    slow = next(s for s in found["node_slots"] if s["node"] == "slow")
    assert slow["ranks"][0] < 2
    assert found["best_ns"] < found["given_ns"]
    assert "forecast-placement" in (run / "report.html").read_text()


@pytest.mark.parametrize(("how", "is_exhaustive"), [("--search", False), ("--all", True)])
def test_placements_are_searched_or_all_tried_as_asked(app, run, tmp_path, how, is_exhaustive):
    """Of few, too, and the search tries no more than it may."""
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("node,factor\na,1\nb,1.3\nc,1.2\nd,1.1\n")
    invoke(app, "place", run, "--nodes", nodes, "--draws", 2, "--rounds", 4, how)
    placed = written(run)["placement"]
    assert placed["exhaustive"] is is_exhaustive
    assert (placed["tried"] == 12) is is_exhaustive


def test_communication_that_was_not_measured_needs_a_cluster(graph, tmp_path):
    """A captured graph has no communication times: they come from the cluster's model, or not."""
    save_graph(graph, tmp_path / "graph")
    with pytest.raises(UsageError, match="--cluster"):
        load_recording(tmp_path, None)
    recording = load_recording(tmp_path, "h100-sxm")
    assert "model of h100-sxm, varied by 2.0%" in model_of(recording).notes[0]
    assert model_of(recording, variability="none").notes == (
        "variation is off: every draw is the run's step",
    )


def test_few_steps_are_extended_by_fitted_distributions(run):
    """Twenty steps are recombined; with four, distributions are fitted."""
    recording = load_recording(run, None)
    assert not model_of(recording).fitted
    assert model_of(replace(recording, samples=recording.samples.select(range(4)))).fitted
    with pytest.raises(UsageError, match="allowed: auto, steps, fitted"):
        model_of(recording, method="guess")


def test_a_runs_own_figures_stay(app, run, tmp_path):
    """The forecast is a further member of the run's results, which still read as a run's."""
    result, timeline, durations = report_run()
    folder = RunFolder(root=tmp_path / "captured")
    save_graph(timeline.graph, folder.graph)
    write_report(folder, result, timeline, durations)
    with pytest.raises(FormatError, match="older version"):
        invoke(app, "forecast", folder.root, "--draws", 20)
    Scenario(cluster=Cluster.load("h100-sxm")).save(folder.scenario)
    invoke(app, "forecast", folder.root, "--draws", 20)
    data = json.loads(folder.results.read_text())
    assert data["world_size"] == result.world_size
    assert "step" in data["forecast"]
    assert read_run(folder)[0] == result
    page = folder.report.read_text()
    assert "forecast-cdf" in page
    assert "plot-memory" in page


def test_an_import_gets_results_of_the_forecast_alone(app, run):
    """The schema's version is there, the figures of a run are not."""
    invoke(app, "forecast", run, "--draws", 20, "--executor", "serial")
    assert json.loads((run / "results.json").read_text()).keys() == {"schema", "forecast"}


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "prismscale.results/9"}'])
def test_damaged_results_are_not_overwritten(app, run, text):
    """They are refused by name, and stay as they are."""
    (run / "results.json").write_text(text)
    with pytest.raises(FormatError, match=r"results\.json"):
        invoke(app, "forecast", run, "--draws", 20, "--executor", "serial")
    assert (run / "results.json").read_text() == text


def test_many_draws_are_thinned_evenly(app, run):
    """Results hold at most 2,000 draws, with the quantiles of all."""
    invoke(app, "forecast", run, "--draws", 5000, "--executor", "serial")
    kept = written(run)["step"]["step_ns"]
    assert len(kept) == 2000
    exact = written(run)["step"]["quantiles_ns"]["0.95"]["value"]
    assert sorted(kept)[1899] == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("method", ["steps", "fitted"])
def test_modelled_communication_is_not_exact(graph, tmp_path, method):
    """It varies as assumed, unless told not to."""
    save_graph(graph, tmp_path / "graph")
    spread = {}
    for cv in (0.0, 0.3):
        variation = Variation(communication_cv=cv)
        recording = load_recording(tmp_path, "h100-sxm", variation)
        model = model_of(recording, method=method)
        config = MonteCarlo(draws=200, steps=1)
        spread[cv] = draw_steps(model.graph, model.source, config).step_ns_D.std()
    assert spread[0.0] == 0
    assert spread[0.3] > 0


def test_modelled_pools_say_so(graph, tmp_path):
    """They are no fits to data, and no small pools."""
    save_graph(graph, tmp_path / "graph")
    fitted = model_of(load_recording(tmp_path, "h100-sxm"), method="fitted").fitted
    notes = {f.pool.name: f.fit.note for f in fitted}
    assert notes["send forward pp-forward×2 @0 (no bubble)"] == "modelled, not measured"


def test_nodes_may_come_from_the_pools(app, graph, tmp_path):
    """A rank that was slow in the recording is a slow node, and its slowness moves with it."""
    run = recorded_run(graph, tmp_path / "run", slow={3: 1.4})
    text = invoke(app, "place", run, "--nodes", "pools")
    assert "node of rank 3" in text
    node_slots = {s["node"]: s for s in written(run)["placement"]["node_slots"]}
    assert node_slots["node of rank 3"]["factor"] > 1.1
    assert node_slots["node of rank 3"]["ranks"][0] < 2
    even = recorded_run(graph, tmp_path / "even")
    with pytest.raises(UsageError, match="no difference between nodes"):
        invoke(app, "place", even, "--nodes", "pools")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        *((("--quantile", q), "lies between 0 and 1") for q in (95, 1, 0, "nan")),
        *((("--slower", s), "a finite factor above 0") for s in (0, -1, "nan", "inf")),
    ],
)
def test_a_bad_promise_is_refused_before_anything_is_read(app, tmp_path, option, says):
    """Not after all draws: here there is not even a run."""
    with pytest.raises(UsageError, match=says):
        invoke(app, "forecast", tmp_path / "none", *option)


def test_a_bad_option_names_itself(app, run, tmp_path):
    """The option, what was given, and what is allowed."""
    (tmp_path / "n.csv").write_text("node,factor\na,1\nb,1\nc,1\nd,1\n")
    for arguments, says in (
        (("forecast", run, "--quantile", "1.5"), "between 0 and 1"),
        (("forecast", run, "--draws", "0"), "draws is 0"),
        (("forecast", run, "--communication-cv", "-1"), "0 or more"),
        (("forecast", run, "--communication-cv", "0.1"), "all of this run's was measured"),
        (("forecast", run, "--seed", "-1"), "seed is -1"),
        (("forecast", run, "--memory", "nan"), "--memory is nan"),
        (("sensitivity", run, "--estimator", "x"), "own, salib"),
        (("place", run, "--nodes", tmp_path / "n.csv", "--quantile", "2"), "between 0 and 1"),
        (("place", run, "--nodes", tmp_path / "n.csv", "--hot", "a"), "--hot 'a'"),
    ):
        with pytest.raises(UsageError, match=says):
            invoke(app, *arguments)
