"""Turns Kineto traces of one or several ranks into a job's graph and the durations of its steps.

The graph holds the recorded ranks, numbered from 0 in order of their rank in the job; groups are
cut to them. Every rank is a class of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError
from prismscale.foreign import reading
from prismscale.formats.imported import ImportedTrace
from prismscale.formats.json_stream import documents
from prismscale.formats.kineto.events import MAX_EVENTS, RankEvents, read_events
from prismscale.formats.kineto.matching import GroupKey, Matched, OwnTimes, match, own_times
from prismscale.formats.kineto.rank import RankSteps, rank_steps
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.graph.verify import verify


def read_kineto(traces: Sequence[Path], *, max_events: int = MAX_EVENTS) -> ImportedTrace:
    """Import Kineto traces: JSON, ``.json.gz``, or a tar archive of them; one file a rank.

    Args:
        traces: the files.
        max_events: most device and runtime events to keep of one rank.

    Raises:
        FormatError: a file is damaged or foreign, or the ranks do not belong together.
        GraphError: members of a group disagree about a communication.
    """
    named = ", ".join(str(path) for path in traces[:3])
    with reading(named or "nothing", "a Kineto trace"):
        return _read(traces, max_events)


def _read(traces: Sequence[Path], max_events: int) -> ImportedTrace:
    events = [
        read_events(name, file, max_events=max_events)
        for path in traces
        for name, file in documents(path)
    ]
    if not events:
        raise FormatError("no trace was given, or the archive holds no .json file")
    events = _in_rank_order(events)
    ranks = _common_steps([rank_steps(e) for e in events])
    global_ranks = [r.rank if r.rank is not None else i for i, r in enumerate(ranks)]
    matched = match(ranks, global_ranks)
    times = own_times(ranks, matched)
    groups = _group_records(matched, len(ranks))
    by_rank = {
        i: _rank_trace(i, rank, groups, matched, times, global_ranks[i])
        for i, rank in enumerate(ranks)
    }
    itself_R = np.arange(len(ranks), dtype=np.int64)
    table = collect_groups(by_rank, len(ranks), itself_R)
    sizes = sorted({e.world_size for e in events if e.world_size})
    graph = assemble(
        by_rank,
        itself_R,
        table,
        meta={
            "source": "kineto",
            "recorded_ranks": ",".join(map(str, global_ranks)),
            "recorded_world_size": ",".join(map(str, sizes)),
        },
    )
    verify(graph)
    repairs = [line for rank in ranks for line in rank.repairs]
    if times.early_ends:
        repairs.append(f"{times.early_ends} communications end before all came: taken as 0 long")
    samples = StepSamples.from_graph(graph)
    return ImportedTrace(
        samples=samples.recorded_as(ranks[0].step_ids, times.step_ns_S), repairs=tuple(repairs)
    )


def _in_rank_order(events: list[RankEvents]) -> list[RankEvents]:
    known = [e.rank for e in events if e.rank is not None]
    if len(set(known)) != len(known):
        raise FormatError(f"two traces are of the same rank (ranks given: {sorted(known)})")
    if known and len(known) < len(events):
        unnamed = [e.name for e in events if e.rank is None]
        raise FormatError(f"{unnamed[0]}: does not say its rank, while others do")
    return sorted(events, key=lambda e: e.rank if e.rank is not None else 0)


def _common_steps(ranks: list[RankSteps]) -> list[RankSteps]:
    """Keep only the steps that every rank recorded."""
    common = set.intersection(*(set(r.step_ids) for r in ranks))
    if not common:
        listed = "; ".join(f"{r.name}: {list(r.step_ids)[:8]}" for r in ranks[:4])
        raise FormatError(f"the ranks have no profiler step in common ({listed})")
    return [rank.only(sorted(common)) for rank in ranks]


def _group_records(matched: Matched, n_ranks: int) -> dict[GroupKey, GroupRecord]:
    """Return all groups, the world first: it is group index 0 of every rank."""
    world: GroupKey = ("", tuple(range(n_ranks)))
    keys = dict.fromkeys([world, *sorted(set(matched.group_of.values()))])
    return {key: GroupRecord(ranks=key[1], name=key[0]) for key in keys}


def _rank_trace(
    index: int,
    rank: RankSteps,
    groups: dict[GroupKey, GroupRecord],
    matched: Matched,
    times: OwnTimes,
    global_rank: int,
) -> RankTrace:
    own = [key for key in groups if index in key[1]]
    builder = TraceBuilder(
        rank=index, world_size=len(next(iter(groups))[1]), groups=[groups[k] for k in own]
    )
    builder.begin_body()
    n_nodes = len(rank.nodes)
    for n, node in enumerate(rank.nodes):
        # -1 - p stands for position p of the body before.
        preds = [p if p >= 0 else -1 - p - n_nodes for p in node.preds]
        durations = times.durations_ns_SN[index][:, n].tolist()
        known, key = node.communication, matched.group_of.get((index, n))
        if known is None or key is None:
            builder.add_compute(durations, preds=preds, label=node.label, lane=node.lane)
            continue
        builder.add_communication(
            known.op,
            known.n_bytes,
            group_index=own.index(key),
            peer=matched.relative_peer((index, n)),
            preds=preds,
            durations_ns=durations,
            label=known.op.spelling,
            lane=node.lane,
        )
    return builder.build(known_groups=list(groups.values()))
