"""Traces as columns: one row per node, traces one after the other, groups shared between them.

Every captured rank knows every group of the job, so each group is stored once: rank sets as runs
(start, step, count), records as (rank set, name, backend), and the group lists of each trace as
runs of record numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import MOST_TAGS, CollectiveOp, NodeKind
from prismscale.graph.parquet import (
    MAX_VALUES,
    MAX_WORLD_SIZE,
    Header,
    column,
    integers,
    join,
    list_column,
    lists,
    numbers,
    schema_of,
    to_runs,
)
from prismscale.graph.trace import LONGEST_NS, GroupRecord, MemoryRecord, RankTrace
from prismscale.typed_files import decode, plain

PLAIN = {
    "kind": pa.uint8(),
    "op": pa.uint8(),
    "lane": pa.int16(),
    "group_index": pa.int16(),
    "peer": pa.int32(),
    "bytes": pa.int64(),
    "site": pa.int32(),
    "label": pa.int32(),
}
"""Plain columns. :class:`RankTrace` holds the column ``name`` as ``name_N``."""
SCHEMA = schema_of(**PLAIN, pred_distance=integers(32), duration_ns=integers(64))


@dataclass(kw_only=True, slots=True)
class StoredGroups:
    """Rank sets and group records, each listed once, numbered in order of first use."""

    sets: dict[tuple[int, ...], int] = field(default_factory=dict)
    records: dict[GroupRecord, int] = field(default_factory=dict)
    _seen: dict[int, tuple[tuple[GroupRecord, ...], list[int]]] = field(default_factory=dict)

    def set_id(self, ranks: tuple[int, ...]) -> int:
        """Return the number of a rank set."""
        return self.sets.setdefault(ranks, len(self.sets))

    def record_runs(self, records: tuple[GroupRecord, ...]) -> list[int]:
        """Return the numbers of ``records`` as runs."""
        # There are thousands of groups, often in the same tuple for every trace. The tuple is kept
        # with its runs because an id is unique only while its object lives.
        if id(records) not in self._seen:
            ids = [self.records.setdefault(r, len(self.records)) for r in records]
            self._seen[id(records)] = (records, to_runs(ids))
        return self._seen[id(records)][1]

    def header(self) -> dict[str, Any]:
        """Return the JSON form."""
        rows = [[self.set_id(r.ranks), r.name, r.backend] for r in self.records]
        within = [[n, r.within] for n, r in enumerate(self.records) if r.within is not None]
        named = {"groups": rows, "within": within} if within else {"groups": rows}
        return {"rank_sets": [to_runs(ranks) for ranks in self.sets], **named}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadGroups:
    """The groups that :meth:`StoredGroups.header` wrote, as read and checked."""

    world_size: int
    sets: list[tuple[int, ...]]
    records: list[GroupRecord]


def read_groups(header: Header) -> ReadGroups:
    """Read the shared group table. Raises :class:`FormatError`."""
    world_size = header.integer("world_size", 1, MAX_WORLD_SIZE)
    sets = header.many_runs("rank_sets", 0, world_size)
    if any(not ranks or len(set(ranks)) != len(ranks) for ranks in sets):
        raise header.error("rank_sets", "holds an empty group, or one that names a rank twice")
    within = dict(header.rows("within", (int, int))) if header.has("within") else {}
    records = []
    for n, row in enumerate(header.rows("groups", (int, str, str))):
        if not 0 <= row[0] < len(sets):
            raise header.error("groups", "names a rank set that is not there")
        record = GroupRecord(ranks=sets[row[0]], name=row[1], backend=row[2], within=within.get(n))
        records.append(record)
    return ReadGroups(world_size=world_size, sets=sets, records=records)


def pack_traces(
    traces: Sequence[RankTrace], groups: StoredGroups
) -> tuple[pa.Table, list[dict[str, Any]]]:
    """Return the node table of ``traces``, and one header section for each trace."""
    columns: dict[str, Any] = {
        name: column(join((getattr(t, f"{name}_N") for t in traces), kind.to_pandas_dtype()), kind)
        for name, kind in PLAIN.items()
    }
    pred_lengths = join((np.diff(t.pred_start_N1) for t in traces), np.int64)
    columns["pred_distance"] = list_column(
        _starts(pred_lengths), join((t.pred_distance_P for t in traces), np.int32), integers(32)
    )
    lengths = join((_sample_counts(t) for t in traces), np.int64)
    # In order of nodes, like the rows of the file.
    values = join((part for t in traces for part in (t.prologue_ns, t.body_ns_SB.T.ravel())), int)
    columns["duration_ns"] = list_column(_starts(lengths), values, integers(64))
    return pa.table(columns, schema=SCHEMA), [_section(t, groups) for t in traces]


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


def _sample_counts(trace: RankTrace) -> NDArray[np.int64]:
    return np.repeat([1, trace.n_samples], [trace.n_prologue, trace.n_body])


def _section(trace: RankTrace, groups: StoredGroups) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "nodes": trace.n_nodes,
        "prologue": trace.n_prologue,
        "samples": trace.n_samples,
        "groups": groups.record_runs(trace.groups),
        "known_groups": groups.record_runs(trace.known_groups),
        "lanes": trace.lanes,
        "labels": trace.labels,
        "sites": trace.sites,
        "memory": asdict(trace.memory) if trace.memory else None,
        "facts": plain(trace.facts),
    }


def unpack_traces(
    table: pa.Table, sections: Sequence[Header], groups: ReadGroups
) -> list[RankTrace]:
    """Build the traces of a node table.

    Raises:
        FormatError: a value that :class:`RankTrace` or the engine could not handle.
    """
    columns = {name: numbers(table, name) for name in PLAIN}
    pred_start, pred_distance = lists(table, "pred_distance")
    duration_start, duration_ns = lists(table, "duration_ns")
    traces, first = [], 0
    shared: dict[int, tuple[GroupRecord, ...]] = {}
    for section in sections:
        stop = first + section.integer("nodes", 0, table.num_rows - first)
        rows = slice(first, stop)
        pred_rows = pred_start[first : stop + 1]
        duration_rows = duration_start[first : stop + 1]
        trace = _Rows(
            section=section,
            columns={name: column[rows] for name, column in columns.items()},
            pred_start=(pred_rows - pred_rows[0]).astype(np.int32),
            pred_distance=pred_distance[pred_rows[0] : pred_rows[-1]],
            duration_start=duration_rows - duration_rows[0],
            duration_ns=duration_ns[duration_rows[0] : duration_rows[-1]],
        )
        traces.append(trace.build(groups, shared))
        first = stop
    if first != table.num_rows:
        raise FormatError(f"{sections[0].path if sections else 'file'}: rows belong to no trace")
    return traces


@dataclass(kw_only=True, slots=True)
class _Rows:
    """The rows of one trace, not yet checked."""

    section: Header
    columns: dict[str, NDArray[Any]]
    pred_start: NDArray[np.int32]
    pred_distance: NDArray[np.int32]
    duration_start: NDArray[np.int64]
    duration_ns: NDArray[np.int64]

    def build(self, groups: ReadGroups, shared: dict[int, tuple[GroupRecord, ...]]) -> RankTrace:
        section, n = self.section, len(self.pred_start) - 1
        n_prologue = section.integer("prologue", 0, n)
        n_records = len(groups.records)
        own = section.runs("groups", 0, n_records)
        # All traces that know the same groups, as captured ranks usually do, share one tuple. The
        # header keeps the sequences that it unfolded, so ids stay unique.
        known = section.runs("known_groups", 0, n_records)
        if id(known) not in shared:
            shared[id(known)] = tuple(groups.records[i] for i in known)
        samples = section.integer("samples", 0, MAX_VALUES)
        trace = RankTrace(
            rank=section.integer("rank", 0, groups.world_size - 1),
            world_size=groups.world_size,
            groups=tuple(groups.records[i] for i in own),
            known_groups=shared[id(known)],
            n_prologue=n_prologue,
            **{f"{name}_N": column for name, column in self.columns.items()},
            pred_start_N1=self.pred_start,
            pred_distance_P=self.pred_distance,
            prologue_ns=self.duration_ns[:n_prologue],
            body_ns_SB=self._body_ns(n_prologue, n - n_prologue, samples),
            lanes=section.texts("lanes"),
            labels=section.texts("labels"),
            sites=section.texts("sites"),
            memory=_memory(section.section("memory")) if section.has("memory") else None,
            facts=_facts(section.section("facts")),
        )
        self._check(trace)
        return trace

    def _body_ns(self, n_prologue: int, n_body: int, samples: int) -> NDArray[np.int64]:
        expected = np.repeat([1, samples], [n_prologue, n_body])
        if not np.array_equal(np.diff(self.duration_start), expected):
            raise self.section.error("samples", "does not fit the durations of the nodes")
        body_ns_BS = self.duration_ns[n_prologue:].reshape(n_body, samples)
        return np.ascontiguousarray(body_ns_BS.T)

    def _check(self, trace: RankTrace) -> None:
        if any(trace.rank not in g.ranks for g in trace.groups):
            raise self.section.error("groups", f"do not all hold rank {trace.rank}")
        if not all(_is_part(trace, index) for index in range(len(trace.groups))):
            raise self.section.error("groups", "of messages are no part of those they are sent in")
        is_compute = trace.kind_N == NodeKind.COMPUTE
        sizes = np.array([len(g.ranks) for g in trace.groups] or [0])
        self._within("kind", trace.kind_N, 0, len(NodeKind))
        self._within("op", trace.op_N, 0, len(CollectiveOp))
        self._within("lane", trace.lane_N, 0, len(trace.lanes))
        self._within("label", trace.label_N, 0, len(trace.labels))
        self._within("site", trace.site_N, -1, len(trace.sites))
        self._within("group_index", trace.group_index_N[is_compute], -1, 0)
        self._within("group_index", trace.group_index_N[~is_compute], 0, len(trace.groups))
        peers = sizes[trace.group_index_N] * np.where(trace.is_message_N, MOST_TAGS, 1)
        self._within("peer", trace.peer_N, -1, np.where(is_compute, 0, peers))
        self._within("bytes", trace.bytes_N, 0, 2**62)
        self._within("duration_ns", self.duration_ns, 0, LONGEST_NS)
        self._within("pred_distance", trace.pred_distance_P, 1, 2**31)
        for kind, op in ((NodeKind.SEND, CollectiveOp.SEND), (NodeKind.RECV, CollectiveOp.RECV)):
            if ((trace.kind_N == kind) != ((trace.op_N == op) & ~is_compute)).any():
                raise self.section.error("nodes", f"mix {op.spelling} with another operation")

    def _within(self, name: str, values: NDArray[Any], low: int, high: Any) -> None:
        if ((values < low) | (values >= high)).any():
            raise self.section.error("nodes", f"have a {name} that is out of range")


def _is_part(trace: RankTrace, index: int) -> bool:
    """Return False if a group added for messages is not part of an earlier, created group."""
    group = trace.groups[index]
    if group.within is None:
        return True
    if not 0 <= group.within < index:
        return False
    wide = trace.groups[group.within]
    return wide.within is None and set(group.ranks) <= set(wide.ranks)


def _facts(section: Header) -> CaptureFacts:
    given = section.content
    if not isinstance(given, dict):
        raise section.error("facts", "must be a table")
    return decode(CaptureFacts, given, f"{section.path}: {section.place}")


def _memory(section: Header) -> MemoryRecord:
    given = section.content
    if not isinstance(given, dict):
        raise section.error("memory", "must be a table")
    record = decode(MemoryRecord, given, f"{section.path}: {section.place}")
    sizes = (record.peak_bytes, *record.step_peak_bytes, record.reserved_bytes or 0)
    if min(*sizes, *(part.n_bytes for part in record.outside)) < 0:
        raise section.error("memory", "has a negative size")
    return record
