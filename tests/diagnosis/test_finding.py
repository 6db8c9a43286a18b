"""From a graph in which a rank makes a mistake to a finding, by way of torch's dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.flight_recorder.fr_trace as torchs_own

from prismscale.diagnosis.expanded import expanded_record
from prismscale.diagnosis.expected import ExpectedCalls
from prismscale.diagnosis.explain import explain
from prismscale.diagnosis.finding import Cause, HangFinding, diagnose
from prismscale.diagnosis.standstill import stand_still
from prismscale.errors import UsageError
from prismscale.formats.flight_recorder.dump_reader import load_flight_record
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from support.jobs import job_from_traces, pipeline_traces

WORLD, WHO = 8, 3
REDUCE, GATHER = CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_GATHER
Call = tuple[CollectiveOp, int, str]
FIRST, SECOND = (REDUCE, 4096, "train.py:10"), (REDUCE, 64, "train.py:11")
STEP: tuple[Call, ...] = (FIRST, SECOND)


def trace(rank: int, steps: Sequence[Sequence[Call]]) -> RankTrace:
    """A rank whose host waits for each of its calls; the steps given, then ordinary ones."""
    world = GroupRecord(ranks=tuple(range(WORLD)), name="world", backend="nccl")
    builder = TraceBuilder(rank=rank, world_size=WORLD, groups=[world])
    last = builder.add_compute(10, label="setup")
    for n, calls in enumerate((*steps, STEP)):
        if n == len(steps):
            builder.begin_body()
        for op, n_bytes, site in calls:
            last = builder.add_communication(op, n_bytes, preds=[last], site=site)
            last = builder.add_compute(10, preds=[last])
    return builder.build(known_groups=[world])


def job(mistaken: Sequence[Call] = STEP) -> JobGraph:
    """Eight ranks, of which one does otherwise in the third step."""
    usual = trace(0, [STEP] * 3)
    other = trace(WHO, [STEP, STEP, mistaken])
    representative = dict.fromkeys(range(WORLD), 0) | {WHO: WHO}
    return job_from_traces({0: usual, WHO: other}, representative)


def found(graph: JobGraph, folder: Path, hang: dict[int, int] | None = None) -> HangFinding:
    """The finding, which the dumps that are written lead to as well."""
    finding = explain(graph, hang or {}, folder)
    assert diagnose(load_flight_record(folder)) == finding
    return finding


@pytest.mark.parametrize(
    ("mistaken", "cause", "line"),
    [
        ([SECOND], Cause.LEFT_OUT, 10),
        ([SECOND, FIRST], Cause.LEFT_OUT, 10),
        ([(REDUCE, 2048, "train.py:10"), SECOND], Cause.SIZE, 10),
        ([(GATHER, 4096, "train.py:12"), SECOND], Cause.OTHER_CALL, 12),
        ([FIRST, SECOND, (REDUCE, 8, "train.py:13")], Cause.OTHER_CALL, 13),
    ],
)
def test_a_mistake_of_one_rank_is_named_with_its_line(
    mistaken: Sequence[Call], cause: Cause, line: int, tmp_path: Path
) -> None:
    """One rank leaves out a call, swaps two, passes another size, calls another, or one more."""
    finding = found(job(mistaken), tmp_path)
    assert (finding.culprits, finding.cause, finding.site) == ((WHO,), cause, f"train.py:{line}")
    assert finding.n_waiting == WORLD - 1


def test_a_rank_that_hangs_is_behind(tmp_path: Path) -> None:
    """It did not come to the call in which the others wait; its last call is named."""
    alone = job_from_traces(
        {0: trace(0, [STEP] * 3), WHO: trace(WHO, [STEP] * 3)},
        dict.fromkeys(range(WORLD), 0) | {WHO: WHO},
    )
    finding = found(alone, tmp_path, {WHO: 1})
    assert (finding.cause, finding.culprits) == (Cause.BEHIND, (WHO,))
    assert (finding.site, finding.stands_at) == ("train.py:10", "train.py:11")


def test_a_rank_without_a_record_is_named(tmp_path: Path) -> None:
    """Whoever died left no file."""
    explain(job([]), {}, tmp_path)
    (tmp_path / f"nccl_trace_rank_{WHO}").unlink()
    finding = diagnose(load_flight_record(tmp_path))
    assert (finding.cause, finding.culprits) == (Cause.NO_RECORD, (WHO,))


def test_stages_of_a_pipeline_are_no_likes(tmp_path: Path) -> None:
    """They do otherwise from the first call on. The call that is named is the first to which the
    rank did not come, though more wait for it in a later one."""
    traces = pipeline_traces(2, 8, 2, 2)
    first = traces[0]
    own = tuple(g for g in first.known_groups if 1 in g.ranks)
    likes = replace(first, rank=1, groups=own)
    ranks = {0: 0} | dict.fromkeys(range(1, 16), 1) | dict.fromkeys(range(16, 32), 16)
    explain(job_from_traces({0: first, 1: likes, 16: traces[16]}, ranks), {0: 1}, tmp_path)
    behind = diagnose(load_flight_record(tmp_path))
    (tmp_path / "nccl_trace_rank_0").unlink()
    gone = diagnose(load_flight_record(tmp_path))
    assert (behind.cause, gone.cause) == (Cause.BEHIND, Cause.NO_RECORD)
    assert behind.culprits == gone.culprits == (0,)
    assert behind.site == gone.site == "train.py:30"
    assert "in group 'tp' of 2" in behind.explanation


def test_a_job_that_goes_on_leaves_nothing(tmp_path: Path) -> None:
    """No finding, no files."""
    assert explain(job(), {}, tmp_path / "flight").cause is Cause.NOTHING
    assert not (tmp_path / "flight").exists()


def test_torchs_analyser_names_the_same_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads our dumps as its own."""
    explain(job([SECOND]), {}, tmp_path)
    with caplog.at_level("INFO"):
        torchs_own.main([str(tmp_path)])
    assert f"Culprit rank {WHO}" in caplog.text


def test_a_run_says_what_comes_next(tmp_path: Path) -> None:
    """The graph of a job without the mistake says where the rank stands, and what it should call;
    one of another size is refused."""
    explain(job([SECOND]), {}, tmp_path)
    record = load_flight_record(tmp_path)
    text = diagnose(record, ExpectedCalls(job(), record)).text()
    assert "in the run, rank 3 calls all_reduce of 4,096 bytes" in text
    assert "and it called all_reduce of 64 Byte (train.py:11)" in text
    small = GroupRecord(ranks=(0, 1), name="world")
    builder = TraceBuilder(rank=0, world_size=2, groups=[small])
    builder.add_compute(1)
    with pytest.raises(UsageError, match="give the run of the same job"):
        ExpectedCalls(job_from_traces({0: builder.build(known_groups=[small])}), record)


def test_two_groups_in_opposite_order_are_a_circle() -> None:
    """Where nobody differs from its likes, the ranks that wait for each other are named."""
    both = [
        GroupRecord(ranks=(0, 1), name="world"),
        GroupRecord(ranks=(0, 1), name="other"),
    ]
    traces = {}
    for rank in (0, 1):
        builder = TraceBuilder(rank=rank, world_size=2, groups=both)
        builder.begin_body()
        last = builder.add_compute(1)
        for group in (rank, 1 - rank):
            last = builder.add_communication(
                REDUCE, 8, group_index=group, preds=[last], site=f"train.py:{group}"
            )
            last = builder.add_compute(1, preds=[last])
        traces[rank] = builder.build(known_groups=both)
    graph = job_from_traces(traces)
    finding = diagnose(expanded_record(graph, stand_still(graph, {})))
    assert (finding.cause, finding.culprits) == (Cause.CIRCLE, (0, 1))
    assert finding.site == "train.py:0"


def test_who_waits_for_a_message_that_is_queued_is_no_culprit() -> None:
    """Its sender has called, but hangs in what comes before on its stream."""
    graph = job_from_traces({rank: _of_a_stage(rank) for rank in range(8)})
    finding = diagnose(expanded_record(graph, stand_still(graph, {5: 1})))
    assert (finding.cause, finding.culprits) == (Cause.BEHIND, (5,))
    assert finding.n_waiting == 7


def _of_a_stage(rank: int) -> RankTrace:
    """Two replicas of two stages of two ranks. The first stage's host issues ahead of its stream;
    the other's waits for the message, before the replicas meet."""
    tensor, pipeline, data = [(n, n + 1) for n in (0, 2, 4, 6)], [(0, 2), (1, 3), (4, 6), (5, 7)], 4
    groups = [range(8), *tensor, *pipeline, *((n, n + data) for n in range(data))]
    known = [GroupRecord(ranks=tuple(members)) for members in groups]
    builder = TraceBuilder(rank=rank, world_size=8, groups=[g for g in known if rank in g.ranks])
    last = builder.add_compute(1)
    builder.begin_body()
    launch = builder.add_compute(1, preds=[last])
    if rank % 4 < 2:
        done = builder.add_communication(REDUCE, 8, group_index=1, preds=[launch])
        launch = builder.add_compute(1, preds=[launch])
        send = CollectiveOp.SEND
        builder.add_communication(send, 8, group_index=2, peer=1, preds=[launch, done])
    else:
        done = builder.add_communication(
            CollectiveOp.RECV, 8, group_index=2, peer=1, preds=[launch]
        )
        launch = builder.add_compute(1, preds=[done])
        builder.add_communication(REDUCE, 8, group_index=3, preds=[launch])
    return builder.build(known_groups=known)
