"""The memory of the fullest GPU in the report: over a step by kind, and its largest blocks."""

from __future__ import annotations

import plotly.graph_objects as go

from prismscale.analysis.answers import answers, fit_of
from prismscale.analysis.memory.memory_kinds import (
    KINDS,
    BlockLife,
    Holder,
    MemoryPeak,
    memory_peak,
)
from prismscale.analysis.memory.memory_log import load_memory_log, memory_path
from prismscale.analysis.memory.memory_timeline import MemoryTimeline, memory_timeline
from prismscale.analysis.result import RunResult
from prismscale.durations.scenario import Scenario
from prismscale.report.answer_rows import answer_rows
from prismscale.report.html import Section, template
from prismscale.report.plots import figure, markup, plain
from prismscale.report.units import duration, size
from prismscale.runfolder import RunFolder

COLOURS = (
    "#2a6099",
    "#5b9bd5",
    "#8e6bb0",
    "#7488a8",
    "#e69138",
    "#b08d57",
    "#3f9c6e",
    "#cc4c3b",
    "#b3b9c2",
)
"""Colour of each of :data:`.KINDS`, in their order."""
GIB = 2**30


def answers_section(result: RunResult) -> Section:
    """Return the section with the answers, the same rows as on the terminal."""
    rows = [tuple(row[:3]) for row in answer_rows(result, answers(result))]
    html = str(template("memory.html.j2").module.answers(rows=rows))
    return Section(title="Answers", html=html, order=5)


def memory_sections(folder: RunFolder, result: RunResult) -> list[Section]:
    """Return the section on memory; no section if the fullest GPU's blocks were not tracked.

    Raises:
        FormatError: a file is damaged.
    """
    fit = fit_of(result)
    if fit is None or not folder.scenario.exists():
        return []
    path = memory_path(folder.root / Scenario.load(folder.scenario).captures, fit.rank)
    if not path.exists():
        return []
    log = load_memory_log(path)
    peak = memory_peak(log)
    html = template("memory.html.j2").module.blocks(
        plot=markup(_drawn(memory_timeline(log)), "memory-kinds"),
        rank=fit.rank,
        summary=_summary(peak),
        kinds=[(k.kind, size(k.n_bytes), f"{k.blocks:,}", _places(k.places)) for k in peak.kinds],
        largest=[_row(block) for block in peak.largest],
    )
    return [Section(title="Memory by kind", html=str(html), order=42)]


def _summary(peak: MemoryPeak) -> list[tuple[str, str]]:
    return [
        ("allocated at most", size(peak.allocated_bytes)),
        ("of it asked for", size(peak.requested_bytes)),
        ("active at most", size(peak.active_bytes)),
        ("reserved at most", size(peak.reserved_bytes)),
        ("fragmentation", size(peak.fragmentation_bytes)),
    ]


def _places(places: tuple[Holder, ...]) -> str:
    return ", ".join(f"{place.name} {size(place.n_bytes)}" for place in places[:4])


def _row(block: BlockLife) -> tuple[str, ...]:
    life = "lives on" if block.life_ns is None else duration(block.life_ns)
    return (
        size(block.n_bytes),
        block.kind,
        block.what,
        block.site,
        block.made_in,
        block.freed_in,
        life,
    )


def _drawn(found: MemoryTimeline) -> go.Figure:
    drawn = figure(
        height=380,
        xaxis={"title": {"text": f"time at which the host issues step {found.step}, ms"}},
        yaxis={"title": {"text": "memory, GiB"}, "rangemode": "tozero"},
    )
    time_ms = (found.time_ns_T / 1e6).tolist()
    for kind, name in enumerate(KINDS):
        if not found.bytes_KT[kind].any():
            continue
        drawn.add_scatter(
            name=plain(name),
            x=time_ms,
            y=(found.bytes_KT[kind] / GIB).tolist(),
            stackgroup="kinds",
            mode="lines",
            line={"width": 0.5, "color": COLOURS[kind], "shape": "hv"},
        )
    drawn.add_scatter(
        name="reserved",
        x=time_ms,
        y=(found.reserved_bytes_T / GIB).tolist(),
        mode="lines",
        line={"width": 1.5, "color": "#8a93a0", "dash": "dash"},
    )
    return drawn
