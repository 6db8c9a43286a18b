"""``prismscale compare``: what differs between runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prismscale.analysis.comparison import compare
from prismscale.analysis.result import RunResult
from prismscale.commands.compare.compare_page import comparison_page
from prismscale.report.folder import write_report
from prismscale.runfolder import RunFolder
from support.browser import open_page
from support.report_job import report_run
from support.runs import prismscale

PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  document.documentElement.dataset.probe = JSON.stringify({
    heard: heard,
    bars: document.querySelectorAll(".bars .point path").length,
    rows: document.querySelectorAll("main table tbody tr").length,
    foreign: document.querySelectorAll("img, [onclick]").length,
  });
}, 500));
</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pipelines, of two stages and of four."""
    folder = tmp_path_factory.mktemp("compared")
    found = []
    for pp in (2, 4):
        result, timeline, durations = report_run(pp=pp)
        run = RunFolder(root=folder / f"pp{pp}")
        run.root.mkdir()
        write_report(run, result, timeline, durations)
        found.append(run.root)
    return found


def test_parts_add_up_to_the_step(runs: list[Path]) -> None:
    """Every nanosecond of the difference between mean ranks' steps has a cause."""
    results = [RunResult.from_json(json.loads((r / "results.json").read_text())) for r in runs]
    (time,) = (p for p in compare(results) if p.title == "Time by cause")
    for n, result in enumerate(results):
        ranks = sum(s.ranks for s in result.stages)
        mean = sum(s.breakdown.step_ns * s.ranks for s in result.stages) / ranks
        assert sum(f.values[n] or 0 for f in time.figures) == pytest.approx(mean, rel=1e-9)
    assert [f.largest for f in time.figures] == sorted(f.largest for f in time.figures)[::-1]


def test_runs_are_compared_on_the_terminal_and_as_json(runs: list[Path], tmp_path: Path) -> None:
    """Names, figures and differences; one run alone is refused."""
    done = prismscale("compare", *runs, "--html", tmp_path / "c.html")
    assert done.code == 0, done.err
    assert "pp2" in done.out
    assert "bubble" in done.out
    assert (tmp_path / "c.html").is_file()
    found = json.loads(prismscale("compare", *runs, "--json").out)
    assert found["runs"] == ["pp2", "pp4"]
    assert prismscale("compare", runs[0]).code == 2


def test_a_page_shows_hostile_names_as_they_are(runs: list[Path], tmp_path: Path) -> None:
    """Bars and tables are drawn, and nothing is taken for markup."""
    results = [RunResult.from_json(json.loads((r / "results.json").read_text())) for r in runs]
    evil = ["<img src=x onerror=alert(1)>", "</script><b onclick=alert(2)>"]
    seen = open_page(comparison_page(evil, results, compare(results)), PROBE, tmp_path)
    assert seen["heard"] == []
    assert seen["foreign"] == 0
    assert seen["bars"] > 4
    assert seen["rows"] > 8


def test_bars_are_drawn_of_parts_that_add_up(runs: list[Path]) -> None:
    """A step and the same step without variation are no parts of a whole."""
    results = [RunResult.from_json(json.loads((r / "results.json").read_text())) for r in runs]
    page = comparison_page(["a", "b"], results, compare(results))
    assert 'id="plot-compare-time-by-cause"' in page
    assert 'id="plot-compare-runs"' not in page
