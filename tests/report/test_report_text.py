"""The summary on the terminal, and the units it is written in."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prismscale.analysis.result import RunResult
from prismscale.durations.source import NEVER
from prismscale.report.remarks import job_shares
from prismscale.report.text import print_summary
from prismscale.report.units import Scale, duration, percent, seconds, size
from prismscale.runfolder import RunFolder
from support.report_job import report_run


def summary(result: RunResult, folder: RunFolder | None = None) -> list[str]:
    """The printed lines on a terminal of 80 columns, without trailing blanks."""
    output = io.StringIO()
    print_summary(result, Console(width=80, file=output), folder)
    return [line.rstrip() for line in output.getvalue().splitlines()]


@pytest.fixture(scope="module")
def result() -> RunResult:
    """A pipeline of four stages with two live ranks."""
    return report_run()[0]


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 64])
def test_fits_80_columns(stages: int) -> None:
    """No line is longer than the terminal, and no figure is cut, for any number of stages."""
    lines = summary(report_run(pp=stages, dp=2, microbatches=2, layers=1)[0])

    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("…") for line in lines)
    (step,) = (line for line in lines if line.startswith(" step "))
    assert len(step.split()) == 1 + min(stages, 4)


def test_collapsed_stages_are_announced() -> None:
    """Where stages are averaged, the table says how many and that others hold them all."""
    text = "\n".join(summary(report_run(pp=8, dp=1, microbatches=2, layers=1)[0]))

    assert "5 others" in text
    assert "stage 7" in text
    assert "Others: means" in text


def test_parts_add_up_to_the_step(result: RunResult) -> None:
    """Computation, exposed communication and waiting are the whole step of every stage."""
    for stage in result.stages:
        b = stage.breakdown
        parts = b.total_compute_ns + b.total_exposed_ns + b.bubble_ns + b.skew_ns
        assert parts == b.step_ns
    assert sum(job_shares(result).values()) == pytest.approx(1)


def test_names_live_ranks_with_their_difference(result: RunResult) -> None:
    """A live rank's line holds prediction, observation and their difference."""
    (line,) = (x for x in summary(result) if re.match(r" +16 +\d", x))
    live = result.live[1]

    assert duration(live.predicted_step_ns) in line
    assert duration(live.median_step_ns) in line
    assert re.search(r"[+-]\d\.\d\d %", line)


def test_hang_is_the_headline_and_names_the_rank() -> None:
    """A job that hangs has no step time; who hangs comes before who waits in consequence."""
    text = " ".join(" ".join(summary(report_run(hang={17: 1}, live=False)[0])).split())

    assert "the job hangs" in text
    assert re.search(r"Warnings Hang: ranks? [^:]* for rank 17:", text)
    assert "more groups that wait" in text


def test_hang_in_the_first_step_still_prints() -> None:
    """A job that ends no step at all has an empty breakdown."""
    result = report_run(hang={0: 0}, live=False)[0]

    assert result.hung
    assert result.stages[0].breakdown.step_ns == 0
    assert "never ends" in "\n".join(summary(result))


def test_few_samples_and_uncovered_calls_are_warned_about() -> None:
    """What weakens the figures is said."""
    text = " ".join(" ".join(summary(report_run(samples=1)[0])).split())

    assert "rests on 1 captured step only" in text
    assert "made 2 communications that its capture did not" in text


def test_brackets_of_a_command_are_not_markup() -> None:
    """What the user typed is printed as it is."""
    assert " [red]x[/] :smile: {0}" in summary(report_run(command="[red]x[/] :smile: {0}")[0])


def test_written_files_are_named(result: RunResult, tmp_path: Path) -> None:
    """Files that exist are listed, others are not."""
    folder = RunFolder(root=tmp_path)
    folder.results.write_text("{}")
    text = "".join(line.strip() for line in summary(result, folder))

    assert str(folder.results) in text
    assert "report.html" not in text


@given(st.integers(1, NEVER - 1))
def test_durations_keep_four_digits(ns: int) -> None:
    """A printed duration is within the fourth digit of the true one."""
    figure, unit = duration(ns).split()
    scale = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]

    assert float(figure.replace(",", "")) * scale == pytest.approx(ns, rel=6e-4)


@given(st.floats(1, 1e15), st.floats(0, 1))
def test_scale_keeps_parts_below_the_whole(largest: float, part: float) -> None:
    """In one table, no part is printed larger than the whole."""
    scale = Scale.of(largest)
    whole, shown = (float(scale.figure(x).replace(",", "")) for x in (largest, part * largest))

    assert 0 <= shown <= whole


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (duration(0), "0 ns"),
        (duration(412_345_678), "412.3 ms"),
        (duration(12_345), "12.35 µs"),
        (duration(NEVER), "never"),
        (size(0), "0 B"),
        (size(3 * 2**30), "3.000 GiB"),
        (seconds(0.25), "0.25 s"),
        (seconds(99.96), "1 min 40 s"),
        (seconds(7_812), "2 h 10 min"),
        (percent(0.0001), "<0.1 %"),
        (percent(0.342), "34.2 %"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    """Figures carry the unit that people would choose."""
    assert shown == expected
