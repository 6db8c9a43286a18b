"""Traces and graphs on disk: Parquet with a JSON header, no pickle. Readers trust no value.

A graph is one file, ``graph.parquet`` in a folder. It holds the nodes of the distinct traces; its
header says which ranks belong to which class and which groups form a family. Group slots are not
stored. They follow from families and members, so a file cannot contradict itself about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.job_graph import Coverage, GroupFamily, GroupSlot, JobGraph, RankClass
from prismscale.graph.parquet import Header, read_table, to_runs, write_table
from prismscale.graph.trace import RankTrace
from prismscale.graph.trace_columns import (
    SCHEMA,
    ReadGroups,
    StoredGroups,
    pack_traces,
    read_groups,
    unpack_traces,
)

GRAPH_FILE = "graph.parquet"


def save_trace(trace: RankTrace, path: Path) -> None:
    """Write one captured rank's trace to ``path``.

    Raises:
        StorageError: the file cannot be written. A file that was there before is unchanged.
    """
    groups = StoredGroups()
    table, sections = pack_traces([trace], groups)
    header = {"world_size": trace.world_size, **groups.header(), "traces": sections}
    write_table(path, table, kind="trace", header=header)


def load_trace(path: Path) -> RankTrace:
    """Read a trace that :func:`save_trace` wrote.

    Raises:
        UsageError: the file does not exist.
        FormatError: the file is damaged, foreign, or of another version.
    """
    table, header = read_table(path, SCHEMA, kind="trace")
    traces = unpack_traces(table, header.sections("traces"), read_groups(header))
    if len(traces) != 1:
        raise header.error("traces", "must hold one trace")
    return traces[0]


def save_traces(traces: Sequence[RankTrace], path: Path) -> None:
    """Write several traces of one job to ``path``.

    Raises:
        StorageError: the file cannot be written. A file that was there before is unchanged.
    """
    groups = StoredGroups()
    table, sections = pack_traces(traces, groups)
    header = {"world_size": traces[0].world_size, **groups.header(), "traces": sections}
    write_table(path, table, kind="traces", header=header)


def load_traces(path: Path) -> list[RankTrace]:
    """Read traces that :func:`save_traces` wrote.

    Raises:
        UsageError: the file does not exist.
        FormatError: the file is damaged, foreign, or of another version.
    """
    table, header = read_table(path, SCHEMA, kind="traces")
    return unpack_traces(table, header.sections("traces"), read_groups(header))


def save_graph(graph: JobGraph, folder: Path) -> None:
    """Write ``graph`` into ``folder``, which is created if it does not exist.

    Raises:
        StorageError: the file cannot be written. A file that was there before is unchanged.
    """
    # There are more classes than traces: pipeline stages may differ only by their position.
    distinct = {id(c.trace): c.trace for c in graph.classes}
    number = {key: n for n, key in enumerate(distinct)}
    groups = StoredGroups()
    table, sections = pack_traces(list(distinct.values()), groups)
    families = [
        {"name": f.name, "sets": to_runs([groups.set_id(tuple(r)) for r in f.ranks_KG.T.tolist()])}
        for f in graph.families
    ]
    header = {
        "world_size": graph.world_size,
        **groups.header(),
        "families": families,
        "classes": [_class_section(c, number[id(c.trace)]) for c in graph.classes],
        "coverage": [_coverage_section(c) for c in graph.coverage],
        "meta": graph.meta,
        "traces": sections,
    }
    write_table(folder / GRAPH_FILE, table, kind="graph", header=header)


def _class_section(rank_class: RankClass, trace: int) -> dict[str, Any]:
    return {
        "trace": trace,
        "members": to_runs(rank_class.members_M.tolist()),
        "families": [slot.family for slot in rank_class.slots],
    }


def _coverage_section(coverage: Coverage) -> dict[str, Any]:
    return {
        "class": coverage.class_index,
        "captured": to_runs(coverage.captured),
        "assumed": coverage.assumed,
    }


def load_graph(folder: Path) -> JobGraph:
    """Read a graph that :func:`save_graph` wrote.

    Indices, lengths and ranges are checked here. :func:`prismscale.graph.verify.verify` checks
    whether the graph is legal.

    Raises:
        UsageError: the file does not exist.
        FormatError: the file is damaged, foreign, or of another version.
    """
    table, header = read_table(folder / GRAPH_FILE, SCHEMA, kind="graph")
    groups = read_groups(header)
    traces = unpack_traces(table, header.sections("traces"), groups)
    families = [_family(s, n, groups) for n, s in enumerate(header.sections("families"))]
    finders = [_SlotFinder(f) for f in families]
    classes = [_rank_class(s, n, traces, finders) for n, s in enumerate(header.sections("classes"))]
    members = np.concatenate([c.members_M for c in classes]) if classes else np.zeros(0)
    if not np.array_equal(np.sort(members), np.arange(groups.world_size)):
        raise header.error("classes", "do not hold every rank once")
    return JobGraph(
        world_size=groups.world_size,
        classes=tuple(classes),
        families=tuple(families),
        coverage=tuple(_coverage(s, len(classes)) for s in header.sections("coverage")),
        meta=header.mapping("meta"),
    )


def _family(section: Header, index: int, groups: ReadGroups) -> GroupFamily:
    sets = [groups.sets[i] for i in section.runs("sets", 0, len(groups.sets))]
    if not sets or len({len(ranks) for ranks in sets}) != 1:
        raise section.error("sets", "must be groups of one size")
    # Checked before the table is built, because runs can name one large set very often.
    section.spend("sets", len(sets) * len(sets[0]))
    table = np.ascontiguousarray(np.array(sets, dtype=np.int64).T)
    if len(np.unique(table)) != table.size:
        raise section.error("sets", "name a rank twice")
    return GroupFamily(index=index, name=section.text("name"), ranks_KG=table)


class _SlotFinder:
    """Finds the places of ranks in a family's table. It is as large as the table, not the world."""

    def __init__(self, family: GroupFamily) -> None:
        self.family = family
        flat = family.ranks_KG.ravel()
        self._slots = np.argsort(flat)
        self._ranks = flat[self._slots]

    def slots(self, members_M: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return each member's flat index into the family's table, or None if one is missing."""
        # A rank above the largest in the table has no place; the comparison below detects it.
        place = np.minimum(np.searchsorted(self._ranks, members_M), len(self._ranks) - 1)
        return self._slots[place] if np.array_equal(self._ranks[place], members_M) else None


def _rank_class(
    section: Header, index: int, traces: list[RankTrace], finders: list[_SlotFinder]
) -> RankClass:
    trace = traces[section.integer("trace", 0, len(traces) - 1)]
    members = np.array(section.runs("members", 0, trace.world_size), dtype=np.int64)
    by_group = section.integers("families", 0, len(finders) - 1)
    if len(members) == 0 or (np.diff(members) <= 0).any():
        raise section.error("members", "must be ranks in ascending order")
    sizes = [finders[f].family.group_size for f in by_group]
    if sizes != [len(g.ranks) for g in trace.groups]:
        raise section.error("families", f"of sizes {sizes} do not fit the groups of its trace")
    slots = tuple(_slot(section, finders[f], members) for f in by_group)
    return RankClass(index=index, trace=trace, members_M=members, slots=slots)


def _slot(section: Header, finder: _SlotFinder, members_M: NDArray[np.int64]) -> GroupSlot:
    slot_M = finder.slots(members_M)
    if slot_M is None:
        raise section.error("families", f"[{finder.family.index}] lacks members of the class")
    position_M, group_M = np.divmod(slot_M, finder.family.n_groups)
    same = bool((position_M == position_M[0]).all())
    return GroupSlot(
        family=finder.family.index,
        slot_M=slot_M,
        group_M=group_M,
        group_rank=int(position_M[0]) if same else -1,
    )


def _coverage(section: Header, n_classes: int) -> Coverage:
    return Coverage(
        class_index=section.integer("class", 0, n_classes - 1),
        captured=section.runs("captured", 0, 2**31),
        assumed=section.integer("assumed", 0, 2**31),
    )
