"""The HTML report, its sections, and the files of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from prismscale.analysis.attribution import Breakdown, break_down
from prismscale.analysis.emulated import KernelKind, KernelUse, UnknownOperator, ValueUse
from prismscale.analysis.result import (
    SCHEMA,
    ClassResult,
    LiveResult,
    RunResult,
    SourceShare,
    StageResult,
)
from prismscale.durations.what_if.effects import Effect
from prismscale.errors import FormatError, UsageError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import save_graph
from prismscale.graph.trace import GroupRecord, MemoryPart
from prismscale.report.folder import read_run, write_page, write_report
from prismscale.report.gantt import Gantt
from prismscale.report.html import Section, render, render_page
from prismscale.report.plots import Palette
from prismscale.report.remarks import part_names
from prismscale.report.sections import run_sections
from prismscale.runfolder import RunFolder
from prismscale.sim.timeline import Timeline, simulate
from support.jobs import RecordedDurations, job_from_traces
from support.report_job import report_run

DOCUMENT = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.fixture(scope="module")
def run() -> tuple[RunResult, Timeline]:
    """A pipeline of four stages with two live ranks."""
    return report_run()[:2]


def gantt(run: tuple[RunResult, Timeline], **options: int) -> Gantt:
    """The timeline of a run."""
    return Gantt(run[1], Palette(part_names(run[0])), **options)


def test_page_loads_nothing(run: tuple[RunResult, Timeline]) -> None:
    """One file: no script, style, image or frame comes from elsewhere, and plotly.js comes once."""
    page = render(run[0], run_sections(*run))

    assert not re.search(r"<(script|img|iframe|source)[^>]*\ssrc=", page)
    assert re.findall(r'<link[^>]*href="([^"]*)"', page) == ["data:,"]
    assert "default-src 'none'" in page
    assert len(re.findall(r"plotly\.js v\d", page)) == 1


def test_page_without_plots_carries_no_plotly() -> None:
    """A page of words stays small."""
    page = render_page("title", [Section(title="A", html="<p>words</p>", order=1)])

    assert len(page) < 40_000
    assert "<p>words</p>" in page


def test_sections_are_ordered_and_linked() -> None:
    """The navigation follows the order, and each entry leads to its section."""
    sections = [Section(title=t, html="", order=o) for t, o in (("Last", 9), ("First & one", 1))]
    page = render_page("title", sections)

    assert re.findall(r'<a href="#([^"]*)">', page) == ["first-one", "last"]
    assert page.index('<section id="first-one">') < page.index('<section id="last">')
    assert "First &amp; one" in page


def test_names_of_users_are_escaped() -> None:
    """Markup in a command or group name is text."""
    evil = "</script><img src=x onerror=alert(1)>"
    result, timeline, _ = report_run(command=evil, data_name=evil, pp=2)
    page = render(result, run_sections(result, timeline))

    assert evil not in page
    assert "&lt;/script&gt;&lt;img" in page


def test_section_of_live_ranks_only_where_there_are_some() -> None:
    """Without live ranks nothing is said about them."""
    result, timeline, _ = report_run(pp=1, live=False)

    assert "Live ranks" not in [s.title for s in run_sections(result, timeline)]


def test_timeline_fills_the_program_lane(run: tuple[RunResult, Timeline]) -> None:
    """Marks of a rank's own lane neither overlap nor leave a gap within the window."""
    for row in gantt(run).rows:
        marks = sorted(m for m in row.marks if m.lane == 0)
        for a, b in itertools.pairwise(marks):
            assert a.end_ns == b.start_ns


def test_timeline_agrees_with_the_breakdown(run: tuple[RunResult, Timeline]) -> None:
    """Over one steady step the lane holds as much computation as the breakdown says."""
    drawn, result = gantt(run), run[0]
    computes = {i for i, k in enumerate(drawn.kinds) if k.name in ("forward", "backward")}
    row, stage = drawn.rows[0], result.stages[0]
    total = sum(m.end_ns - m.start_ns for m in row.marks if m.lane == 0 and m.kind in computes)
    expected = stage.breakdown.compute_ns["forward"] + stage.breakdown.compute_ns["backward"]

    assert total / 2 == pytest.approx(expected, rel=0.25)


def test_too_many_marks_leave_out_the_shortest_and_say_so(
    run: tuple[RunResult, Timeline],
) -> None:
    """The number of marks is bounded; the sentence counts what is missing."""
    whole, drawn = gantt(run), gantt(run, most_marks=100)
    everything = sorted(m.end_ns - m.start_ns for row in whole.rows for m in row.marks)
    kept = [m.end_ns - m.start_ns for row in drawn.rows for m in row.marks]

    assert sorted(kept) == everything[-100:]
    assert f"{len(everything) - 100:,} of {len(everything):,} marks" in drawn.left_out[0]


def test_timeline_of_a_hang_ends() -> None:
    """What never ends is cut at the window, which holds everything that still happens."""
    result, timeline, _ = report_run(hang={17: 1}, live=False)
    drawn = gantt((result, timeline))
    data = drawn.data()

    assert 0 < data["span"] < 10 * result.stages[0].breakdown.step_ns
    ends = [np.add(row["start"], row["length"]).max() for row in data["rows"]]
    assert max(ends) == data["span"]


def test_write_report_writes_every_file(run: tuple[RunResult, Timeline], tmp_path: Path) -> None:
    """All files of a run appear, whole, and nothing else."""
    result, timeline, durations = report_run()
    folder = RunFolder(root=tmp_path)
    write_report(folder, result, timeline, durations)

    names = {"results.json", "report.html", "timeline.parquet", "trace.perfetto-trace"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert json.loads(folder.results.read_text())["schema"] == SCHEMA


def test_a_run_is_read_back_and_its_page_extended(tmp_path: Path) -> None:
    """Other commands add sections to the page of a finished run."""
    result, timeline, durations = report_run(pp=2)
    folder = RunFolder(root=tmp_path)
    save_graph(timeline.graph, folder.graph)
    write_report(folder, result, timeline, durations)
    read = read_run(folder)
    write_page(folder, *read, [Section(title="Forecast", html="<p>p95</p>", order=25)])

    assert read[0] == result
    page = folder.report.read_text()
    assert page.index('id="timeline"') < page.index('id="forecast"') < page.index('id="memory"')


def test_reading_an_empty_folder_says_how_to_mend_it(tmp_path: Path) -> None:
    """No finished run is an error with its remedy."""
    with pytest.raises(UsageError, match="holds no finished run"):
        read_run(RunFolder(root=tmp_path))


@pytest.mark.parametrize("change", [{"schema": "other/1"}, {"step_ns": "fast"}, {"more": 1}])
def test_foreign_results_are_refused(
    change: dict[str, object], run: tuple[RunResult, Timeline]
) -> None:
    """Another schema, a wrong type or an unknown field is refused."""
    with pytest.raises(FormatError):
        RunResult.from_json({**run[0].to_json(), **change})


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("The run", RunResult),
        ("What-ifs", Effect),
        ("Stages", StageResult),
        ("Memory parts", MemoryPart),
        ("Breakdown", Breakdown),
        ("Rank classes", ClassResult),
        ("Live ranks", LiveResult),
        ("Sources of durations", SourceShare),
        ("Kernels", KernelKind),
        ("Largest kernels", KernelUse),
        ("Unknown operators", UnknownOperator),
        ("Values", ValueUse),
    ],
)
def test_document_names_exactly_the_fields(heading: str, cls: type) -> None:
    """The schema's document has one line for each field, in each section, and no other."""
    sections = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)
    (section,) = (s for s in sections if s.startswith(heading + "\n"))

    documented = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert documented == [f.name for f in dataclasses.fields(cls)]


def test_a_host_that_runs_ahead_is_not_drawn_over_its_device() -> None:
    """The broad bar shows of each label what the breakdown of the step counts."""
    builder = TraceBuilder(
        rank=0, world_size=1, groups=[GroupRecord(ranks=(0,), name="world", backend="nccl")]
    )
    builder.begin_body()
    host = device = -1
    for label, ms in (("forward", 10), ("backward", 20)):
        host = builder.add_compute(2_000_000, preds=[host], lane="host", label=f"{label}, host")
        before = [host] if device < 0 else [host, device]
        device = builder.add_compute(ms * 1_000_000, preds=before, lane="stream 0", label=label)
    graph = job_from_traces({0: builder.build()})
    timeline = simulate(graph, RecordedDurations(graph), steps=3, ranks=[0])
    counted = break_down(timeline, 0).compute_ns

    drawn = Gantt(timeline, Palette([("computation", label) for label in counted]))
    (row,) = drawn.rows
    found: dict[str, int] = {}
    for mark in row.marks:
        if mark.lane == 0 and mark.start_ns >= int(timeline.step_end_ns_TDR[1, 0, 0]):
            name = drawn.kinds[mark.kind].name
            found[name] = found.get(name, 0) + mark.end_ns - mark.start_ns
    assert found == {label: ns for label, ns in counted.items() if ns}
