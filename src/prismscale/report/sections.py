"""The sections of a run's HTML report, from its result and its timeline."""

from __future__ import annotations

from statistics import median

import plotly.graph_objects as go

from prismscale.analysis.result import LiveResult, RunResult
from prismscale.analysis.stages import stage_name
from prismscale.graph.pipeline import stage_of
from prismscale.report.gantt import Gantt
from prismscale.report.html import Section, template
from prismscale.report.kernels import (
    CALL_HEADS,
    KIND_HEADS,
    VALUE_HEADS,
    call_rows,
    coverage_sentence,
    kind_rows,
    stand_in_sentences,
    value_rows,
)
from prismscale.report.plots import OBSERVED, PREDICTED, Palette, figure, markup, plain
from prismscale.report.remarks import (
    class_sentences,
    difference,
    event_name,
    event_source,
    live_peak,
    outside_sentence,
    part_names,
    parts_of,
    payload_rows,
    router_sentences,
    transfer_rows,
    variability_sentence,
    watched_sentence,
)
from prismscale.report.units import Scale, duration, percent, seconds, signed_percent, size
from prismscale.sim.timeline import Timeline

NAMES = {"skew": "skew: waiting for the last of a group", "bubble": "bubble: waiting in the pipe"}


def run_sections(result: RunResult, timeline: Timeline) -> list[Section]:
    """Return all sections of a run, without those for which it has no data."""
    palette = Palette(part_names(result))
    return [
        _steps(result, palette),
        *([_timeline(timeline, palette)] if timeline.ranks else []),
        *([_events(result)] if result.notable_events else []),
        *([_live(result)] if result.live else []),
        _memory(result, timeline),
        *([_kernels(result)] if result.kernels else []),
        *([_values(result)] if result.values else []),
        *([_payloads(result)] if result.payloads else []),
        *([_transfers(result)] if transfer_rows(result) else []),
        _classes(result),
        _sources(result),
        _data(result),
    ]


def _block(name: str, **values: object) -> str:
    """Render one macro of the section templates."""
    return str(getattr(template("sections.html.j2").module, name)(**values))


def _steps(result: RunResult, palette: Palette) -> Section:
    scale = Scale.of(max((s.breakdown.step_ns for s in result.stages), default=0))
    drawn = figure(
        height=110 + _row_height(len(result.stages)) * len(result.stages),
        barmode="stack",
        xaxis_title=f"time in one step, {scale.unit}",
        bargap=0.3,
    )
    stages = [plain(s.name) for s in result.stages]
    for kind, name in part_names(result):
        values = [
            sum(p.ns for p in parts_of(s.breakdown) if (p.kind, p.name) == (kind, name))
            for s in result.stages
        ]
        if not any(values):
            continue
        shares = [
            v / (s.breakdown.step_ns or 1) for v, s in zip(values, result.stages, strict=True)
        ]
        label = f"exposed {name}" if kind == "communication" else NAMES.get(name, name)
        drawn.add_bar(
            name=plain(label),
            orientation="h",
            y=stages,
            x=[v / scale.ns for v in values],
            customdata=[[duration(v), percent(p)] for v, p in zip(values, shares, strict=True)],
            hovertemplate="%{y}: %{customdata[0]}, %{customdata[1]}<extra>%{fullData.name}</extra>",
            marker={
                "color": palette.of(kind, name),
                "pattern": {"shape": "/" if kind == "waiting" else "", "solidity": 0.25},
            },
        )
    drawn.update_yaxes(autorange="reversed", showgrid=False)
    html = _block("steps", plot=markup(drawn, "steps"), stages=len(result.stages), hung=result.hung)
    return Section(title="Step", html=html, order=10)


def _row_height(rows: int) -> int:
    return 46 if rows <= 8 else 26 if rows <= 32 else 18


def _timeline(timeline: Timeline, palette: Palette) -> Section:
    gantt = Gantt(timeline, palette)
    order = palette.colours
    kinds = sorted(gantt.kinds, key=lambda k: (k.hatched, order.index(k.colour)))
    html = _block("timeline", data=gantt.data(), kinds=kinds, left_out=gantt.left_out)
    return Section(title="Timeline", html=html, order=20)


def _live(result: RunResult) -> Section:
    scale = Scale.of(max(max((*r.step_ns, r.predicted_step_ns)) for r in result.live))
    drawn = figure(
        height=380,
        xaxis={"title": {"text": "steady step"}, "domain": [0, 0.7], "dtick": _tick(result.live)},
        xaxis2={"domain": [0.74, 1], "title": {"text": "distribution"}, "showgrid": False},
        yaxis={"title": {"text": f"step time, {scale.unit}"}},
        boxmode="group",
    )
    for n, live in enumerate(result.live):
        colour = OBSERVED[n % len(OBSERVED)]
        _add_live(drawn, live, colour, scale)
    for predicted in sorted({r.predicted_step_ns for r in result.live}):
        drawn.add_hline(
            y=predicted / scale.ns,
            line={"color": PREDICTED, "dash": "dash", "width": 1.5},
            annotation={"text": f"predicted {duration(predicted)}", "font": {"size": 12}},
            annotation_position="top right",
        )
    rows = [_live_row(live) for live in result.live]
    html = _block("live", plot=markup(drawn, "live"), rows=rows)
    return Section(title="Live ranks", html=html, order=30)


def _tick(live: tuple[LiveResult, ...]) -> int:
    return max(1, max(len(r.step_ns) for r in live) // 12)


def _add_live(drawn: go.Figure, live: LiveResult, colour: str, scale: Scale) -> None:
    name, times = f"rank {live.rank}", [t / scale.ns for t in live.step_ns]
    drawn.add_scatter(
        name=name,
        x=list(range(1, len(times) + 1)),
        y=times,
        mode="markers",
        marker={"color": colour, "size": 8},
        legendgroup=name,
        hovertemplate=f"{name}, step %{{x}}: %{{customdata}}<extra></extra>",
        customdata=[duration(t) for t in live.step_ns],
    )
    drawn.add_box(
        name=name,
        y=times,
        xaxis="x2",
        marker={"color": colour},
        line={"width": 1.5},
        boxpoints=False,
        legendgroup=name,
        showlegend=False,
        hoverinfo="y",
    )


def _live_row(live: LiveResult) -> list[str]:
    off = difference(live)
    return [
        str(live.rank),
        duration(live.predicted_step_ns),
        duration(median(live.step_ns)) if live.step_ns else "–",
        "–" if off is None else signed_percent(off),
        duration(live.waited_ns),
        duration(live.lag_ns),
        live_peak(live),
        seconds(live.boot_s),
        f"{live.communications:,}",
        f"{live.uncovered:,}",
    ]


def _memory_rows(result: RunResult) -> list[list[str]]:
    """Return the memory of the fullest GPU of each stage whose allocator has segments."""
    return [
        [stage.name, size(stage.reserved_bytes), size(stage.outside_bytes)]
        for stage in result.stages
        if stage.reserved_bytes
    ]


def _memory(result: RunResult, timeline: Timeline) -> Section:
    tracked = [s for s in result.stages if s.peak_bytes is not None]
    sources = sorted({s.memory_source for s in tracked})
    if not tracked:
        empty = _block("memory", plot="", sources=[], rows=[], outside="")
        return Section(title="Memory", html=empty, order=40)
    large = any((s.peak_bytes or 0) >= 2**30 for s in tracked)
    unit, scale = ("GiB", 2**30) if large else ("MiB", 2**20)
    drawn = figure(
        height=110 + _row_height(len(tracked)) * len(tracked),
        xaxis={"title": {"text": f"peak allocated memory, {unit}"}, "rangemode": "tozero"},
        bargap=0.35,
    )
    drawn.add_bar(
        name="captured ranks",
        orientation="h",
        y=[plain(s.name) for s in tracked],
        x=[(s.peak_bytes or 0) / scale for s in tracked],
        customdata=[size(s.peak_bytes or 0) for s in tracked],
        hovertemplate="%{y}: %{customdata}<extra>captured</extra>",
        marker={"color": "#3f7cb8"},
        showlegend=bool(result.live),
    )
    if result.live:
        drawn.add_scatter(
            name="live ranks",
            mode="markers",
            y=[_stage_of(timeline, r.rank) for r in result.live],
            x=[r.peak_bytes / scale for r in result.live],
            customdata=[[str(r.rank), size(r.peak_bytes)] for r in result.live],
            hovertemplate="rank %{customdata[0]}: %{customdata[1]}<extra>live</extra>",
            marker={"color": OBSERVED[0], "symbol": "diamond", "size": 11},
        )
    drawn.update_yaxes(autorange="reversed", showgrid=False)
    html = _block(
        "memory",
        plot=markup(drawn, "memory"),
        sources=sources,
        rows=_memory_rows(result),
        outside=outside_sentence(result),
    )
    return Section(title="Memory", html=html, order=40)


def _stage_of(timeline: Timeline, rank: int) -> str:
    graph = timeline.graph
    return stage_name(stage_of(graph.classes[int(graph.class_of_R[rank])]))


def _classes(result: RunResult) -> Section:
    sentences = [*class_sentences(result), *router_sentences(result)]
    html = _block("classes", sentences=sentences, classes=result.classes)
    return Section(title="Rank classes", html=html, order=50)


def _sources(result: RunResult) -> Section:
    rows = [(s.source, percent(s.share), s.error) for s in result.sources]
    html = _block("sources", rows=rows, variation=variability_sentence(result))
    return Section(title="Durations", html=html, order=60)


def _kernels(result: RunResult) -> Section:
    html = _block(
        "kernels",
        ranks=len(result.captured),
        sentences=[coverage_sentence(result), *stand_in_sentences(result)],
        kinds=(KIND_HEADS, kind_rows(result)),
        calls=(CALL_HEADS, call_rows(result)),
    )
    return Section(title="Kernels", html=html, order=62)


def _events(result: RunResult) -> Section:
    rows = [
        (
            event_name(event),
            event.seen,
            duration(event.extra_ns),
            percent(event.share) if event.every else "",
            event_source(event),
        )
        for event in result.notable_events
    ]
    html = _block("events", rows=rows, watched=watched_sentence(result))
    return Section(title="What happens only in some steps", html=html, order=25)


def _transfers(result: RunResult) -> Section:
    html = _block("transfers", rows=transfer_rows(result))
    return Section(title="Transfers", html=html, order=66)


def _payloads(result: RunResult) -> Section:
    return Section(title="Payloads", html=_block("payloads", rows=payload_rows(result)), order=65)


def _values(result: RunResult) -> Section:
    html = _block("values", heads=VALUE_HEADS, rows=value_rows(result))
    return Section(title="Made-up values", html=html, order=64)


def _data(result: RunResult) -> Section:
    wall = [(name, seconds(wall_s)) for name, wall_s in result.wall_s.items()]
    total = seconds(sum(result.wall_s.values()))
    memory = size(result.peak_rss_bytes) if result.peak_rss_bytes else ""
    html = _block("data", wall=wall, total=total, memory=memory, nodes=f"{result.rank_nodes:,}")
    return Section(title="Cost and data", html=html, order=70)
