"""PRISM's experiments on null runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prismscale.commands.study.study_prism import study_prism
from prismscale.errors import FormatError, UsageError
from support.forecast_jobs import forecast_app, invoke, recorded_run, small_graph
from support.null_run import stored_null_run

DRAWS = ("--draws", 160, "--executor", "serial")


@pytest.fixture(scope="module")
def app() -> Any:
    app = forecast_app()
    app.command("study-prism")(study_prism)
    return app


@pytest.fixture
def null_run(tmp_path: Path) -> Path:
    return stored_null_run(tmp_path / "null", replicas=4)


def section(root: Path, name: str) -> dict[str, Any]:
    """A part of a run's forecasts."""
    found: dict[str, Any] = json.loads((root / "results.json").read_text())["forecast"][name]
    return found


def test_a_study_agrees_with_the_commands_that_it_stands_for(app: Any, null_run: Path) -> None:
    """Step, quantiles, chances, hot nodes and placements are those of the single commands."""
    invoke(app, "study-prism", null_run, *DRAWS, "--hot", "1.1,1.5", "--slower", "1.01")
    invoke(app, "forecast", null_run, *DRAWS, "--slower", 1.01, "--no-shares")
    invoke(app, "sensitivity", null_run, *DRAWS)
    invoke(app, "place", null_run, "--nodes", "profile", "--hot", "1.1,1.5", "--draws", 160)
    parts = ("prism", "step", "sensitivity", "placement")
    study, forecast, sensitivity, place = (section(null_run, part) for part in parts)
    of_commands = (forecast, sensitivity, place)
    steady_ns = {part["step_without_variation_ns"] for part in of_commands}
    assert steady_ns == {study["step_without_variation_ns"]}
    for q in ("0.5", "0.95"):
        assert study["quantiles_ns"][q] == forecast["quantiles_ns"][q]
    assert study["quantiles_ns"]["0.95"]["value"] == sensitivity["p95_ns"]
    assert study["variation_cost"] == forecast["variation_cost"]
    assert study["slowdown"]["1.01"]["value"] == forecast["slowdown"]["value"]
    assert study["spread"] == forecast["spread"]
    hot = ("stage", "factor", "step_ns", "slowdown")
    assert [[h[k] for k in hot] for h in study["hot"]] == [
        [h[k] for k in hot] for h in place["hot"]
    ]
    for key in ("given_ns", "best_ns", "worst_ns", "tried", "exhaustive"):
        assert study["placement"][key] == place[key]
    own = {a["name"]: a["p95_gain"] for a in sensitivity["ablations"]}
    classes = {c["name"]: c["p95_gain"] for c in study["classes"]}
    assert classes["gemm kernels"] == own["gemm kernels"]


def test_a_hot_node_stretches_the_tail_of_its_stage(app: Any, null_run: Path) -> None:
    """The hottest is drawn, too, and its p95 lies beyond that of the job without it."""
    invoke(app, "study-prism", null_run, *DRAWS, "--hot", "1.1,1.5")
    study = section(null_run, "prism")
    far = [h["p95_ns"] for h in study["hot"] if h["factor"] == 1.5]
    assert min(far) > study["quantiles_ns"]["0.95"]["value"]
    assert study["hot_p95_spread"] == max(far) / min(far) - 1
    assert all(h["p95_ns"] is None for h in study["hot"] if h["factor"] == 1.1)


def test_several_sizes_of_a_job_stand_side_by_side(app: Any, tmp_path: Path) -> None:
    """Smallest first, each in its own folder's results and report."""
    wide = stored_null_run(tmp_path / "wide", replicas=8)
    small = stored_null_run(tmp_path / "small", replicas=4)
    text = invoke(app, "study-prism", wide, small, *DRAWS)
    sizes = [section(root, "prism")["world_size"] for root in (small, wide)]
    assert sizes == [16, 32]
    growth = text[text.index("steady") : text.index("chance")]
    assert growth.index(" 16 ") < growth.index(" 32 ")
    assert "PRISM&#39;s experiments" in (wide / "report.html").read_text()


def test_what_cannot_be_studied_says_what_can(app: Any, null_run: Path, tmp_path: Path) -> None:
    """A recording, a run held still, a run given twice, a hot node that is not one."""
    recorded = recorded_run(small_graph(), tmp_path / "recorded")
    for arguments, said in (
        ((recorded,), "null device"),
        ((null_run, "--variability", "none"), "null device"),
        ((null_run, null_run), "twice"),
        ((null_run, "--hot", "warm"), "--hot"),
        ((null_run, "--slower", "0"), "--slower"),
        ((tmp_path / "nothing",), "holds no run"),
    ):
        with pytest.raises(UsageError, match=said):
            invoke(app, "study-prism", *arguments, *DRAWS)


@pytest.mark.parametrize("cv", ["-0.01", "7.0"])
def test_a_profile_that_no_fleet_has_is_refused(
    app: Any, null_run: Path, tmp_path: Path, cv: str
) -> None:
    """A negative coefficient of variation, and one of 700 %."""
    path = tmp_path / "mine.toml"
    path.write_text(f"[kernels.gemm]\ntemporal_cv = {cv}\n")
    with pytest.raises(FormatError, match="temporal_cv"):
        invoke(app, "study-prism", null_run, "--variability", path, *DRAWS)


def test_devices_that_do_not_differ_cannot_be_placed(
    app: Any, null_run: Path, tmp_path: Path
) -> None:
    """Nodes are drawn from the profile: one whose devices are alike has none of unequal speed."""
    path = tmp_path / "alike.toml"
    path.write_text("[kernels.gemm]\ntemporal_cv = 0.01\n")
    with pytest.raises(UsageError, match="do not differ"):
        invoke(app, "study-prism", null_run, "--variability", path, *DRAWS)


def test_a_class_of_kernels_that_has_no_name_of_its_own_counts_among_the_others(
    app: Any, null_run: Path, tmp_path: Path
) -> None:
    """The classes are those of the profile."""
    path = tmp_path / "even.toml"
    path.write_text("[kernels.default]\ntemporal_cv = 0.01\nspatial_cv = 0.01\n")
    invoke(app, "study-prism", null_run, "--variability", path, *DRAWS)
    names = {c["name"] for c in section(null_run, "prism")["classes"]}
    assert "other kernels" in names
    assert "gemm kernels" not in names
