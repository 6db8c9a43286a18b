"""README's picture: the timeline of a real run as SVG, one for light and one for dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from prismscale.analysis.attribution import last_predecessor
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import NodeKind
from prismscale.report.folder import read_run
from prismscale.report.units import duration
from prismscale.runfolder import RunFolder
from prismscale.sim.timeline import RankTimeline, Timeline

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 960, 132, 24, 88, 44, 28
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MOST_ROWS = 8
SMALLEST = 0.35
"""Bars narrower than this many units are drawn so wide: a transfer of microseconds is seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours."""

    page: str
    ink: str
    soft: str
    line: str
    forward: str
    backward: str
    optimizer: str
    communication: str
    waiting: str


LIGHT = Theme(
    page="#fbfbfa", ink="#1b2027", soft="#5d6672", line="#e2e5ea", forward="#5b9bd5",
    backward="#2a6099", optimizer="#8e6bb0", communication="#e69138", waiting="#e9ebef",
)  # fmt: skip
DARK = Theme(
    page="#14171b", ink="#e6e9ee", soft="#9aa4b2", line="#2e343d", forward="#7db4e6",
    backward="#3f7cb8", optimizer="#a98bc9", communication="#e69138", waiting="#23282f",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One stretch of a rank's own lane."""

    kind: str
    """A field of :class:`Theme`."""
    start_ns: int
    end_ns: int


def draw_pictures(run: Path, out: Path) -> None:
    """``timeline-light.svg`` and ``timeline-dark.svg`` of the last step of ``run``."""
    result, timeline = read_run(RunFolder(root=run))
    out.mkdir(parents=True, exist_ok=True)
    stages = {s.first_rank: s.name for s in result.stages}
    ranks = [r for r in sorted(timeline.ranks) if r in stages][:MOST_ROWS]
    title = f"One step of {result.world_size:,} ranks, {duration(result.step_ns)}: computed on "
    title += f"{result.device}, links of {result.cluster}"
    window = _last_step(timeline)
    rows = [
        (f"rank {r}", stages[r], merged(bars(timeline, timeline.ranks[r], window))) for r in ranks
    ]
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        (out / f"timeline-{name}.svg").write_text(_svg(title, rows, window, theme))


def merged(parts: Iterable[Bar]) -> list[Bar]:
    """Neighbours of one kind as one bar."""
    out: list[Bar] = []
    for bar in parts:
        if out and (out[-1].kind, out[-1].end_ns) == (bar.kind, bar.start_ns):
            out[-1] = replace(out[-1], end_ns=bar.end_ns)
        else:
            out.append(bar)
    return out


def bars(timeline: Timeline, seen: RankTimeline, window: tuple[int, int]) -> Iterator[Bar]:
    """Computation within ``window``; a gap is waiting, then what its communication moved."""
    rank_class = timeline.graph.classes[seen.class_index]
    trace, clock = rank_class.trace, window[0]
    for row in range(len(seen.end_ns_N)):
        node = trace.template(seen.first_position + row)
        start, end = int(seen.start_ns_N[row]), int(seen.end_ns_N[row])
        if trace.kind_N[node] != NodeKind.COMPUTE or end <= window[0] or start >= window[1]:
            continue
        if start > clock:
            moves = max(clock, min(start, _ready_ns(seen, rank_class, row)))
            yield from _cut("waiting", clock, moves, window)
            yield from _cut("communication", moves, start, window)
        label = trace.labels[int(trace.label_N[node])]
        kind = label if label in ("backward", "optimizer") else "forward"
        yield from _cut(kind, max(start, clock), end, window)
        clock = max(clock, end)
    yield from _cut("waiting", clock, window[1], window)


def _cut(kind: str, start: int, end: int, window: tuple[int, int]) -> Iterator[Bar]:
    start, end = max(start, window[0]), min(end, window[1])
    if end > start:
        yield Bar(kind=kind, start_ns=start, end_ns=end)


def _ready_ns(seen: RankTimeline, rank_class: RankClass, row: int) -> int:
    cause = last_predecessor(seen, rank_class, row)
    node = rank_class.trace.template(seen.first_position + cause)
    if seen.ready_ns_N is None or rank_class.trace.kind_N[node] == NodeKind.COMPUTE:
        return int(seen.end_ns_N[cause])
    return int(seen.ready_ns_N[cause])


def _last_step(timeline: Timeline) -> tuple[int, int]:
    ends_TR = timeline.step_end_ns_TDR[:, 0]
    return int(ends_TR[-2].max()), int(ends_TR[-1].max())


def _svg(
    title: str, rows: list[tuple[str, str, list[Bar]]], window: tuple[int, int], theme: Theme
) -> str:
    height = TOP + ROW * len(rows) + 40
    scale = (WIDTH - LEFT - RIGHT) / (window[1] - window[0])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="{FONT}" font-size="13" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{theme.page}"/>',
        f'<text x="24" y="32" font-size="16" font-weight="600" fill="{theme.ink}">'
        f"{html.escape(title)}</text>",
        *_legend(theme),
        *_ticks(window, scale, height, theme),
    ]
    for n, (rank, stage, own) in enumerate(rows):
        y = TOP + ROW * n
        parts.append(f'<text x="24" y="{y + 12}" fill="{theme.ink}">{rank}</text>')
        parts.append(
            f'<text x="24" y="{y + 27}" font-size="11" fill="{theme.soft}">'
            f"{html.escape(stage)}</text>"
        )
        # Communication last: its thin bars lie over their neighbours.
        for bar in sorted(own, key=lambda b: b.kind == "communication"):
            x = LEFT + (bar.start_ns - window[0]) * scale
            width = max(SMALLEST, (bar.end_ns - bar.start_ns) * scale)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" '
                f'fill="{getattr(theme, bar.kind)}"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _legend(theme: Theme) -> Iterator[str]:
    x = 24
    for kind in ("forward", "backward", "optimizer", "communication", "waiting"):
        name = "exposed communication" if kind == "communication" else kind
        yield f'<rect x="{x}" y="48" width="12" height="12" rx="2" fill="{getattr(theme, kind)}"/>'
        yield f'<text x="{x + 18}" y="59" font-size="12" fill="{theme.soft}">{name}</text>'
        x += 44 + 7 * len(name)


def _ticks(window: tuple[int, int], scale: float, height: int, theme: Theme) -> Iterator[str]:
    span = window[1] - window[0]
    rough = span / 6
    unit = 10 ** (len(str(int(rough))) - 1)
    every = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    for t in range(0, span + 1, every):
        x = LEFT + t * scale
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 32}" '
            f'stroke="{theme.line}"/>'
        )
        yield (
            f'<text x="{x:.1f}" y="{height - 14}" font-size="11" text-anchor="middle" '
            f'fill="{theme.soft}">{t / 1e6:,.0f} ms</text>'
        )
