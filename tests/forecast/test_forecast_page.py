"""Sections of forecasts in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from support.browser import open_page
from support.forecast_jobs import forecast_app, invoke, recorded_run, small_graph

EVIL = "<img src=x onerror=alert(1)>"
PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const count = (what) => document.querySelectorAll(what).length;
  document.documentElement.dataset.probe = JSON.stringify({
    heard: heard,
    requests: performance.getEntriesByType("resource").map((e) => e.name),
    density: count("#plot-forecast-density .bars .point path"),
    cdf: count("#plot-forecast-cdf .scatterlayer .js-line"),
    tornado: count("#plot-forecast-tornado .bars .point path"),
    map: count("#plot-forecast-placement .heatmaplayer image"),
    images: count("main img"),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    text: document.querySelector("main").innerText,
  });
}, 500));
</script>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with all three sections, opened on a narrow screen; a node's name is markup."""
    folder = tmp_path_factory.mktemp("forecast")
    app, run = forecast_app(), recorded_run(small_graph(), folder / "run")
    draws = ("--draws", 50, "--seed", 1)
    invoke(app, "forecast", run, *draws, "--executor", "serial")
    invoke(app, "sensitivity", run, *draws, "--executor", "serial", "--method", "fitted")
    (folder / "n.csv").write_text(f"node,factor\n{EVIL},1.3\nb,1\nc,1\nd,1\n")
    invoke(app, "place", run, "--nodes", folder / "n.csv", "--hot", "1.1,1.5")
    return open_page((run / "report.html").read_text(), PROBE, folder)


def test_every_section_is_drawn(seen: dict[str, Any]) -> None:
    """Density, CDF, tornado and map of nodes."""
    assert seen["density"] > 5
    assert seen["cdf"] == 1
    assert seen["tornado"] >= 3
    assert seen["map"] == 1


def test_tables_say_what_the_plots_show(seen: dict[str, Any]) -> None:
    """Guarantees, indices, and the cost of a slow node."""
    for words in ("step, p95", "with interactions", "one slow node at"):
        assert words in seen["text"]


def test_nothing_fails_and_nothing_is_requested(seen: dict[str, Any]) -> None:
    """No error, no request, and a node's name stays text."""
    assert (seen["heard"], seen["requests"], seen["images"]) == ([], [], 0)


def test_a_narrow_screen_does_not_scroll_sideways(seen: dict[str, Any]) -> None:
    """The page is as wide as the screen."""
    assert seen["overflow"] == 0
