"""Compares the calls in a rank's flight record with those of its program in a run's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from prismscale.diagnosis.expanded import RECORDED_AS
from prismscale.errors import UsageError
from prismscale.formats.flight_recorder.rank_calls import CallShape, FlightRecord, RankCalls
from prismscale.graph.assembly.narrowed import as_sent
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp

_OPS = {RECORDED_AS.get(op, op.spelling): op for op in CollectiveOp} | {
    "allreduce_coalesced": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER,
    "all_gather_single": CollectiveOp.ALL_GATHER,
    "all_gather_into_tensor_coalesced": CollectiveOp.ALL_GATHER,
    "ALLGATHER_coalesced": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "reduce_scatter_single": CollectiveOp.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": CollectiveOp.REDUCE_SCATTER,
    "REDUCE_SCATTER_coalesced": CollectiveOp.REDUCE_SCATTER,
    "_broadcast_oop": CollectiveOp.BROADCAST,
    "_reduce_oop": CollectiveOp.REDUCE,
    "barrier": CollectiveOp.BARRIER,
    "all_to_all_single": CollectiveOp.ALL_TO_ALL,
    "all_to_all_v_single": CollectiveOp.ALL_TO_ALL,
}
_ITEM_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedCall:
    """A call, in a form common to graph and flight record."""

    ranks: tuple[int, ...]
    """Global ranks of its group."""
    op: CollectiveOp
    peer: int
    n_bytes: int | None
    """None where members may differ in size, or where the record does not tell."""

    def is_same(self, other: ExpectedCall) -> bool:
        """Whether both can be the same call; an unknown size matches any."""
        if (self.ranks, self.op, self.peer) != (other.ranks, other.op, other.peer):
            return False
        return None in (self.n_bytes, other.n_bytes) or self.n_bytes == other.n_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class NextCall:
    """The next call of a rank in its program, and what the rank called instead, if anything."""

    words: str
    site: str
    differs: str = ""
    """The rank's call in its place, with its line; empty where it made no further call."""


class ExpectedCalls:
    """The programs of all ranks of a run."""

    def __init__(self, graph: JobGraph, record: FlightRecord) -> None:
        """
        Raises:
            UsageError: the record has more ranks than the run.
        """
        if record.world_size > graph.world_size:
            raise UsageError(
                f"the records name rank {record.world_size - 1:,}, and the run has "
                f"{graph.world_size:,} ranks: give the run of the same job"
            )
        self._graph, self._record = graph, record

    def next_call(self, rank: int) -> NextCall | None:
        """Return the first call of the program that a rank did not make.

        Returns None where the rank's record does not follow the program at all.
        """
        calls = self._record.ranks.get(rank)
        if calls is None:
            return None
        rank_class = self._graph.classes[int(self._graph.class_of_R[rank])]
        nodes, n_prologue = self._nodes(rank_class)
        program = list(self._of_nodes(rank_class, rank, nodes))
        body = len(program) - n_prologue
        own = list(self._of_record(calls))
        at = self._begin(program, n_prologue, own, calls.is_whole)
        if at is None or not program:
            return None
        for n, call in enumerate(own):
            place = _place(at + n, n_prologue, body)
            if place is None:
                return None
            if not call.is_same(program[place]):
                line = self._record.site(int(calls.columns.site_N[n]))
                shape = self._record.shapes[int(calls.columns.shape_N[n])]
                return self._next(rank_class, nodes[place], f"{shape.sentence()} ({line})")
        place = _place(at + len(own), n_prologue, body)
        return None if place is None else self._next(rank_class, nodes[place], "")

    def _next(self, rank_class: RankClass, node: int, differs: str) -> NextCall:
        trace = rank_class.trace
        return NextCall(words=trace.describe(node), site=trace.site(node), differs=differs)

    @staticmethod
    def _nodes(rank_class: RankClass) -> tuple[list[int], int]:
        trace = rank_class.trace
        recorded = trace.communicates_N & (trace.op_N != CollectiveOp.SYMM_MEM_BARRIER)
        nodes = np.flatnonzero(recorded)
        return nodes.tolist(), int((nodes < trace.n_prologue).sum())

    def _of_nodes(
        self, rank_class: RankClass, rank: int, nodes: Iterable[int]
    ) -> Iterator[ExpectedCall]:
        trace, member = rank_class.trace, int(self._graph.member_of_R[rank])
        ranks_by_group = [
            tuple(self._graph.families[s.family].ranks_KG[:, int(s.group_M[member])].tolist())
            for s in rank_class.slots
        ]
        group_index_N, peer_N = as_sent(trace)
        for node in nodes:
            ranks = ranks_by_group[int(group_index_N[node])]
            op = CollectiveOp(int(trace.op_N[node]))
            agree = op.bytes_must_agree or op.is_p2p
            yield ExpectedCall(
                ranks=ranks,
                op=op,
                peer=int(peer_N[node]) % len(ranks) if op.is_p2p else -1,
                n_bytes=int(trace.bytes_N[node]) if agree else None,
            )

    def _of_record(self, calls: RankCalls) -> Iterator[ExpectedCall]:
        columns = calls.columns
        rows = zip(
            columns.group_N.tolist(), columns.shape_N.tolist(), columns.peer_N.tolist(), strict=True
        )
        for group, shape_index, peer in rows:
            shape = self._record.shapes[shape_index]
            op = _OPS.get(shape.op, CollectiveOp.SYMM_MEM_BARRIER)
            agree = op.bytes_must_agree or op.is_p2p
            yield ExpectedCall(
                ranks=calls.groups[group].ranks,
                op=op,
                peer=peer,
                n_bytes=_n_bytes(shape) if agree else None,
            )

    @staticmethod
    def _begin(
        program: Sequence[ExpectedCall],
        n_prologue: int,
        own: Sequence[ExpectedCall],
        is_whole: bool,
    ) -> int | None:
        """Return the program position at which the record begins: where most of its calls fit."""
        if is_whole:
            return 0
        body = len(program) - n_prologue
        best, fitting = None, 0
        for begin in range(n_prologue, len(program)):
            n = 0
            while n < min(len(own), 4 * body) and own[n].is_same(
                program[n_prologue + (begin - n_prologue + n) % body]
            ):
                n += 1
            if n > fitting:
                best, fitting = begin, n
        return best


def _place(n: int, n_prologue: int, body: int) -> int | None:
    """Return the index of the stored call that is ``n``-th in ``prologue, body, body, …``."""
    if n < n_prologue:
        return n
    return n_prologue + (n - n_prologue) % body if body else None


def _n_bytes(shape: CallShape) -> int | None:
    """Return the bytes of input or output, whichever is larger."""
    item = _ITEM_BYTES.get(shape.dtypes[0]) if shape.dtypes else None
    if item is None:
        return None
    sides = (sum(map(prod, shape.input_sizes)), sum(map(prod, shape.output_sizes)))
    return item * max(sides)
