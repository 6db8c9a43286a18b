"""The timeline of a report: marks of the shown ranks over the last steps, as compact columns.

``timeline.js.j2`` draws them on a canvas, because SVG cannot move tens of thousands of marks, each
with its own size and words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.attribution import last_predecessor
from prismscale.analysis.stages import stage_name
from prismscale.durations.source import NEVER
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.pipeline import stage_of
from prismscale.report.plots import Palette
from prismscale.report.units import counted, duration, size
from prismscale.sim.timeline import RankTimeline, Timeline

STEPS = 2
MOST_ROWS = 64
MOST_MARKS = 100_000
MOST_LANES = 4
WAITING = "waiting"

_Look = tuple[int, int]
"""``kind`` and ``info`` of a :class:`Mark`."""


class Mark(NamedTuple):
    """One bar of the timeline."""

    lane: int
    """0 is the program's own lane. Lanes from 1 on show communications in progress."""
    start_ns: int
    end_ns: int
    kind: int
    """Index into :attr:`Gantt.kinds`."""
    info: int
    """Index into :attr:`Gantt.infos`."""


class BarKind(NamedTuple):
    """Meaning and look of marks, as in the legend."""

    name: str
    colour: str
    hatched: bool


@dataclass(kw_only=True)
class GanttRow:
    """The marks of one rank."""

    rank: int
    label: str
    marks: list[Mark] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        """Number of lanes that its marks use."""
        return 1 + max((m.lane for m in self.marks), default=0)


class Gantt:
    """Marks of the kept ranks of ``timeline``, within the last :data:`STEPS` steps that end."""

    def __init__(
        self, timeline: Timeline, palette: Palette, *, most_marks: int = MOST_MARKS
    ) -> None:
        self._timeline, self._palette = timeline, palette
        self._kinds: dict[BarKind, int] = {}
        self._infos: dict[tuple[str, ...], int] = {}
        self._looks: dict[tuple[int, int], tuple[_Look, _Look]] = {}
        self.left_out: list[str] = []
        shown = sorted(timeline.ranks)
        if len(shown) > MOST_ROWS:
            self.left_out.append(f"{len(shown) - MOST_ROWS} more ranks are not drawn here.")
        self.begin_ns, self.end_ns, self.step_end_ns = self._window(shown[:MOST_ROWS])
        self.rows = [self._row(timeline.ranks[rank]) for rank in shown[:MOST_ROWS]]
        self._thin_out(most_marks)

    @property
    def kinds(self) -> list[BarKind]:
        """All kinds, in the order of their indices."""
        return list(self._kinds)

    def data(self) -> dict[str, Any]:
        """Return the data that the page draws; times are relative to the start of the window."""
        rows = []
        for row in self.rows:
            columns = list(zip(*sorted(row.marks, key=lambda m: m.start_ns), strict=True))
            lane, start, end, kind, info = columns or ([], [], [], [], [])
            rows.append(
                {
                    "rank": row.rank,
                    "label": row.label,
                    "lanes": row.lanes,
                    "lane": lane,
                    "start": [s - self.begin_ns for s in start],
                    "length": [e - s for s, e in zip(start, end, strict=True)],
                    "kind": kind,
                    "info": info,
                }
            )
        return {
            "rows": rows,
            "kinds": [k._asdict() for k in self.kinds],
            "infos": [words for _, *words in self._infos],
            "searches": [search for search, *_ in self._infos],
            "span": max(1, self.end_ns - self.begin_ns),
            "steps": [{"name": n, "end": t - self.begin_ns} for n, t in self.step_end_ns],
        }

    def _window(self, ranks: Sequence[int]) -> tuple[int, int, list[tuple[str, int]]]:
        ends_TR = self._timeline.step_end_ns_TDR[:, 0]
        ended = np.flatnonzero((ends_TR < NEVER).all(axis=-1))
        last = int(ended[-1]) if len(ended) else -1
        first = max(0, last - STEPS + 1)
        begin = int(ends_TR[first - 1][list(ranks)].min()) if first else 0
        steps = [(f"step {t}", int(ends_TR[t].max())) for t in range(first, last + 1)]
        if last == len(ends_TR) - 1:
            return begin, int(ends_TR[last].max()), steps
        # A hang: show everything that still happens, and a little of the silence after it.
        kept = (self._timeline.ranks[r].end_ns_N for r in ranks)
        latest = max((int(e[e < NEVER].max(initial=0)) for e in kept), default=0)
        return begin, latest + max(1, (latest - begin) // 10), steps

    def _row(self, seen: RankTimeline) -> GanttRow:
        rank_class = self._timeline.graph.classes[seen.class_index]
        row = GanttRow(rank=seen.rank, label=stage_name(stage_of(rank_class)))
        if row.label == stage_name(None):
            row.label = ""
        row.marks.extend(self._program(seen, rank_class))
        row.marks.extend(self._communications(seen, rank_class))
        return row

    def _program(self, seen: RankTimeline, rank_class: RankClass) -> Iterator[Mark]:
        """Yield computation and the gaps between: waiting, then exposed communication."""
        trace = rank_class.trace
        nodes = _template_nodes(seen, rank_class)
        shown = (trace.kind_N[nodes] == NodeKind.COMPUTE) & (seen.end_ns_N > self.begin_ns)
        clock = self.begin_ns
        for row in np.flatnonzero(shown).tolist():
            start, end = int(seen.start_ns_N[row]), int(seen.end_ns_N[row])
            if start > clock:
                yield from self._gap(seen, rank_class, row, clock)
            if start >= self.end_ns:
                return
            label = trace.labels[int(trace.label_N[nodes[row]])] or "computation"
            known = trace.site_N[nodes[row]] >= 0
            phase = label.partition(", ")[0]
            site = [trace.site(nodes[row])] if known else []
            info = self._info(label, *site, search=phase)
            kind = self._kind("computation", label)
            if end >= NEVER:
                kind = self._kind(WAITING, WAITING)
                info = self._info("stopped for ever", search=phase)
            # As in the breakdown, time that computation on another lane already accounts for is
            # not drawn again. This happens, for example, where a device is behind its host.
            yield from self._mark(0, max(start, clock), end, kind, info)
            clock = max(clock, end)

    def _gap(
        self, seen: RankTimeline, rank_class: RankClass, row: int, clock: int
    ) -> Iterator[Mark]:
        cause = last_predecessor(seen, rank_class, row)
        node = rank_class.trace.template(seen.first_position + cause)
        start = int(seen.start_ns_N[row])
        moves = min(max(clock, _ready_ns(seen, cause)), start)
        yield from self._communication(0, (clock, moves, start), rank_class, node)

    def _communications(self, seen: RankTimeline, rank_class: RankClass) -> Iterator[Mark]:
        trace = rank_class.trace
        nodes = _template_nodes(seen, rank_class)
        inside = (seen.end_ns_N > self.begin_ns) & (seen.start_ns_N < self.end_ns)
        rows = np.flatnonzero(inside & (trace.kind_N[nodes] != NodeKind.COMPUTE)).tolist()
        busy_until = [0] * MOST_LANES
        for row in sorted(rows, key=lambda r: int(seen.start_ns_N[r])):
            start, end = int(seen.start_ns_N[row]), int(seen.end_ns_N[row])
            free = (i for i, until in enumerate(busy_until) if until <= start)
            lane = next(free, MOST_LANES - 1)
            busy_until[lane] = end
            first = max(start, self.begin_ns)
            times = (first, min(max(_ready_ns(seen, row), first), end), end)
            yield from self._communication(lane + 1, times, rank_class, nodes[row])

    def _communication(
        self, lane: int, times: tuple[int, int, int], rank_class: RankClass, node: int
    ) -> Iterator[Mark]:
        """Yield waiting between the first two times, and data movement between the last two."""
        key = (rank_class.index, node)
        if key not in self._looks:
            self._looks[key] = self._look(rank_class, node)
        waiting, moving = self._looks[key]
        yield from self._mark(lane, times[0], times[1], *waiting)
        yield from self._mark(lane, times[1], times[2], *moving)

    def _look(self, rank_class: RankClass, node: int) -> tuple[_Look, _Look]:
        trace = rank_class.trace
        waits = self._kind(WAITING, WAITING)
        if trace.kind_N[node] == NodeKind.COMPUTE:
            other = (waits, self._info("waiting for another lane of this rank", search="waiting"))
            return other, other
        group_index = int(trace.group_index_N[node])
        name, ranks = (
            trace.groups[group_index].name or f"group {group_index}",
            len(trace.groups[group_index].ranks),
        )
        op = CollectiveOp(int(trace.op_N[node])).spelling
        n_bytes = size(int(trace.bytes_N[node]))
        words = (f"{n_bytes} in {name} of {counted(ranks, 'rank')}", trace.site(node))
        return (
            (waits, self._info(f"waiting for the other side of {op}", *words, search=name)),
            (self._kind("communication", name), self._info(op, *words, search=name)),
        )

    def _mark(self, lane: int, start: int, end: int, kind: int, info: int) -> Iterator[Mark]:
        end = min(end, self.end_ns)
        if end > start:
            yield Mark(lane, start, end, kind, info)

    def _kind(self, kind: str, name: str) -> int:
        hatched = kind == WAITING
        colour = self._palette.of(kind, "bubble" if hatched else name)
        entry = BarKind(name=name, colour=colour, hatched=hatched)
        return self._kinds.setdefault(entry, len(self._kinds))

    def _info(self, *words: str, search: str) -> int:
        """Number of a bar's text; ``search``: what to look for in the tables when it is clicked."""
        return self._infos.setdefault((search, *words), len(self._infos))

    def _thin_out(self, most_marks: int) -> None:
        """Keep only the longest marks if there are too many to draw."""
        lengths = np.array([m.end_ns - m.start_ns for row in self.rows for m in row.marks])
        if len(lengths) <= most_marks:
            return
        by_length = np.argsort(-lengths, kind="stable")
        keep = np.zeros(len(lengths), dtype=bool)
        keep[by_length[:most_marks]] = True
        first = 0
        for row in self.rows:
            stop = first + len(row.marks)
            row.marks = [m for m, k in zip(row.marks, keep[first:stop], strict=True) if k]
            first = stop
        longest = int(lengths[by_length[most_marks]])
        self.left_out.append(
            f"{len(lengths) - most_marks:,} of {len(lengths):,} marks, none longer than "
            f"{duration(longest)}, are left out here."
        )


def _template_nodes(seen: RankTimeline, rank_class: RankClass) -> NDArray[np.int64]:
    """Return the stored node of every row: :meth:`RankTrace.template` for all rows at once."""
    trace = rank_class.trace
    position = seen.first_position + np.arange(len(seen.end_ns_N))
    body = trace.n_prologue + (position - trace.n_prologue) % max(1, trace.n_body)
    return np.where(position < trace.n_nodes, position, body)


def _ready_ns(seen: RankTimeline, row: int) -> int:
    return int(seen.moves_from_ns_N[row])
