"""Builds the flight record that a job would leave: every rank's, from its graph's classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismscale.diagnosis.standstill import ClassStanding
from prismscale.formats.flight_recorder.rank_calls import (
    CallColumns,
    CallShape,
    FlightRecord,
    RankCalls,
    RecordedGroup,
)
from prismscale.graph.assembly.narrowed import as_sent
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace

RECORDED_AS = {
    CollectiveOp.ALL_GATHER: "_all_gather_base",
    CollectiveOp.REDUCE_SCATTER: "_reduce_scatter_base",
    CollectiveOp.BARRIER: "all_reduce_barrier",
}
"""Names of torch's recorder where they differ from the operation's name."""
_SPLIT_INPUT = (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER)
_SPLIT_OUTPUT = (CollectiveOp.REDUCE_SCATTER, CollectiveOp.SCATTER)
DEFAULT_GROUP = "default_pg"


def expanded_record(graph: JobGraph, standings: Sequence[ClassStanding]) -> FlightRecord:
    """Return what every rank would have recorded, given where its class stands.

    Args:
        graph: the job.
        standings: one for each class.
    """
    tables = _Tables()
    columns = [
        tables.columns(rank_class.trace, standing)
        for rank_class, standing in zip(graph.classes, standings, strict=True)
    ]
    return FlightRecord(
        shapes=tuple(tables.shapes),
        sites=tuple(tables.sites),
        ranks=_ExpandedRanks(graph=graph, columns=columns),
        world_size=graph.world_size,
    )


@dataclass(frozen=True, kw_only=True)
class _ExpandedRanks(Mapping[int, RankCalls]):
    """Lazy mapping from rank to its calls."""

    graph: JobGraph
    columns: Sequence[CallColumns]
    """Calls by class."""

    @cached_property
    def _groups(self) -> list[list[RecordedGroup]]:
        """Groups by family, then by group of the family."""
        world, number, found = self.graph.world_size, 0, []
        for family in self.graph.families:
            named = []
            for ranks in family.ranks_KG.T.tolist():
                is_world = number == 0 and len(ranks) == world
                description = DEFAULT_GROUP if is_world else family.name
                named.append(
                    RecordedGroup(name=str(number), description=description, ranks=tuple(ranks))
                )
                number += 1
            found.append(named)
        return found

    def __getitem__(self, rank: int) -> RankCalls:
        if not 0 <= rank < self.graph.world_size:
            raise KeyError(rank)
        rank_class = self.graph.classes[int(self.graph.class_of_R[rank])]
        return RankCalls(
            rank=rank,
            groups=tuple(self._groups_of(rank_class, int(self.graph.member_of_R[rank]))),
            columns=self.columns[rank_class.index],
        )

    def _groups_of(self, rank_class: RankClass, member: int) -> Iterator[RecordedGroup]:
        for slot, record in zip(rank_class.slots, rank_class.trace.groups, strict=True):
            if record.within is None:
                yield self._groups[slot.family][int(slot.group_M[member])]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.graph.world_size))

    def __len__(self) -> int:
        return self.graph.world_size


class _Tables:
    """Tables of call shapes and call sites that all ranks share."""

    def __init__(self) -> None:
        self.shapes: dict[CallShape, int] = {}
        self.sites: dict[str, int] = {}

    def columns(self, trace: RankTrace, standing: ClassStanding) -> CallColumns:
        """Return the calls of one class."""
        nodes = standing.node_C
        group_N, peer_N = (column[nodes].astype(np.int32) for column in as_sent(trace))
        shapes = [self._shape(trace, node) for node in nodes.tolist()]
        is_p2p = trace.is_message_N[nodes]
        sizes = np.array([len(g.ranks) for g in trace.groups], dtype=np.int32)
        sites = [self._site(trace, node) for node in nodes.tolist()]
        return CallColumns(
            group_N=group_N,
            shape_N=np.array(shapes, dtype=np.int32),
            peer_N=np.where(is_p2p, peer_N % sizes[group_N], -1).astype(np.int32),
            seq_N=_numbered(group_N, is_p2p),
            state_N=standing.state_C,
            site_N=np.array(sites, dtype=np.int32),
        )

    def _shape(self, trace: RankTrace, node: int) -> int:
        op, n_bytes = CollectiveOp(int(trace.op_N[node])), int(trace.bytes_N[node])
        size = len(trace.groups[int(trace.group_index_N[node])].ranks)
        part = max(n_bytes // size, 1)
        shape = CallShape(
            op=RECORDED_AS.get(op, op.spelling),
            input_sizes=((part if op in _SPLIT_INPUT else n_bytes,),),
            output_sizes=((part if op in _SPLIT_OUTPUT else n_bytes,),),
            dtypes=("Byte",),
        )
        return self.shapes.setdefault(shape, len(self.shapes))

    def _site(self, trace: RankTrace, node: int) -> int:
        if trace.site_N[node] < 0:
            return -1
        return self.sites.setdefault(trace.site(node), len(self.sites))


def _numbered(group_N: NDArray[np.int32], is_p2p: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number the calls of each kind (message or collective) in each group, from 1."""
    counts: dict[tuple[int, bool], int] = {}
    numbers = []
    for key in zip(group_N.tolist(), is_p2p.tolist(), strict=True):
        counts[key] = counts.get(key, 0) + 1
        numbers.append(counts[key])
    return np.array(numbers, dtype=np.int64)
