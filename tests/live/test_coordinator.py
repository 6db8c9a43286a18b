"""The coordinator: virtual ranks replayed around live ones, equal to the simulation."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.cluster import Cluster
from prismscale.cost.collective import CollectiveModel, collective_model
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.source import NEVER
from prismscale.errors import UsageError
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.live.coordinator.core import Coordinator
from prismscale.live.coordinator.wire import UNCOVERED_ID_BASE, Message, MessageKind, Wire
from prismscale.sim.program import compile_job
from prismscale.sim.timeline import RankTimeline, simulate
from support.jobs import mesh_groups
from support.report_job import StageWriter

STEPS = 3
MODEL: CollectiveModel = collective_model(Cluster.load("h100-sxm"))


class Mailbox:
    """What a live rank is told."""

    process = None
    """None at its other end."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def post(self, message: Message) -> None:
        """Keep."""
        self.messages.append(message)

    def released(self) -> dict[int, int]:
        """End by position."""
        return {m.position: m.time_ns for m in self.messages if m.kind == MessageKind.RELEASE}

    def faults(self) -> list[str]:
        """What never ends, and why."""
        texts = [m.text or {} for m in self.messages if m.kind == MessageKind.FAULT]
        return [str(t["summary"]) for t in texts]


def job(live: tuple[int, ...], pp: int = 2, dp: int = 4) -> JobGraph:
    """A pipeline × data parallel job in which live ranks have classes of their own."""
    mesh = np.arange(pp * dp).reshape(pp, dp)
    records = mesh_groups(mesh, {"dp_shard": 1, "pp": 0})
    stages = mesh[:, 0].tolist()
    writers = {r: StageWriter(s, pp, r, records, samples=2) for s, r in enumerate(stages)}
    traces = {r: w.trace(microbatches=3, layers=2) for r, w in writers.items()}
    representative_R = mesh.reshape(-1) // dp * dp
    groups = collect_groups(traces, mesh.size, representative_R)
    return assemble(traces, representative_R, groups, alone=live)


def first_calls(graph: JobGraph, rank: int = 0) -> list[int]:
    """Positions of the communications of the first step."""
    trace = graph.classes[int(graph.class_of_R[rank])].trace
    return list(trace.communications(trace.n_prologue, trace.n_nodes))


def coordinator(
    graph: JobGraph, live: tuple[int, ...], faults: Faults | None = None
) -> tuple[Coordinator, dict[int, Mailbox]]:
    """Ready to go."""
    durations = GraphDurations(graph=graph, model=MODEL, faults=faults or Faults(), sampled=True)
    made = Coordinator(compile_job(graph), durations, MODEL, list(live))
    boxes = {rank: Mailbox() for rank in live}
    for rank, box in boxes.items():
        made.join(rank, box)  # type: ignore[arg-type]
    made.go()
    return made, boxes


def simulated(
    graph: JobGraph, live: tuple[int, ...], faults: Faults | None = None
) -> dict[int, RankTimeline]:
    """What the whole job does when live ranks are like their captures."""
    durations = GraphDurations(graph=graph, model=MODEL, faults=faults or Faults(), sampled=True)
    return simulate(graph, durations, steps=STEPS, ranks=live, with_prologue=True).ranks


def communications(graph: JobGraph, timeline: RankTimeline) -> Iterator[tuple[int, int, int]]:
    """(position, arrival, end) of each communication, in program order."""
    trace = graph.classes[timeline.class_index].trace
    for x in range(trace.n_prologue + STEPS * trace.n_body):
        if trace.kind_N[trace.template(x)] != NodeKind.COMPUTE:
            row = x - timeline.first_position
            yield x, int(timeline.start_ns_N[row]), int(timeline.end_ns_N[row])


@pytest.mark.parametrize("live", [(0,), (3,), (0, 1), (1, 5), (0, 2, 4, 7)])
def test_live_ranks_that_act_like_their_captures_see_the_simulation(live: tuple[int, ...]) -> None:
    """Every communication of every live rank ends when the simulation says, to the nanosecond."""
    graph = job(live)
    made, boxes = coordinator(graph, live)
    expected = {r: list(communications(graph, t)) for r, t in simulated(graph, live).items()}
    arrivals = sorted((start, r, x) for r, seen in expected.items() for x, start, _ in seen)
    for start, rank, x in arrivals:
        made.handle(rank, Message(MessageKind.ARRIVE, x, start))
    for rank, seen in expected.items():
        assert boxes[rank].released() == {x: end for x, _, end in seen}


@settings(deadline=None, max_examples=20)
@given(factor=st.floats(1.1, 20), rank=st.sampled_from([0, 3, 6]))
def test_a_late_live_rank_makes_everyone_late(factor: float, rank: int) -> None:
    """As late as the simulation of a slow rank: the live one arrives when that one does."""
    graph = job((rank,))
    slow = Faults(slow={rank: factor})
    made, boxes = coordinator(graph, (rank,))
    seen = list(communications(graph, simulated(graph, (rank,), slow)[rank]))
    for x, start, _ in seen:
        made.handle(rank, Message(MessageKind.ARRIVE, x, start))
    assert boxes[rank].released() == {x: end for x, _, end in seen}


def test_a_virtual_rank_is_never_early() -> None:
    """A live rank that arrives at once still waits for computation that others have to do."""
    graph = job((3,))
    made, boxes = coordinator(graph, (3,))
    seen = list(communications(graph, simulated(graph, (3,))[3]))
    last = 0
    for x, _, _ in seen:
        made.handle(3, Message(MessageKind.ARRIVE, x, last))
        last = max(last, boxes[3].released()[x])
    assert 0 < last <= seen[-1][2]


def test_two_live_ranks_wait_for_each_other() -> None:
    """The first arrival of a pair is not answered before the second."""
    graph = job((0, 1))
    made, boxes = coordinator(graph, (0, 1))
    first = first_calls(graph)[0]
    made.handle(0, Message(MessageKind.ARRIVE, first, 1_000_000))
    assert boxes[0].released() == {}
    made.handle(1, Message(MessageKind.ARRIVE, first, 5_000_000))
    assert boxes[0].released() == boxes[1].released()
    assert boxes[0].released()[first] > 5_000_000


@pytest.mark.parametrize("ranks", [[3, 7], list(range(8))])
def test_a_group_that_the_graph_lacks_is_answered_by_its_ranks(ranks: list[int]) -> None:
    """An evaluation may make groups after the captured steps."""
    made, boxes = coordinator(job((3,)), (3,))
    text = {"op": "all_reduce", "n_bytes": 1 << 20, "group_index": 99, "ranks": ranks}
    made.handle(3, Message(MessageKind.UNCOVERED, UNCOVERED_ID_BASE, 500, text))
    takes = int(MODEL.duration_ns(CollectiveOp.ALL_REDUCE, 1 << 20, np.array(ranks)[:, None])[0])
    assert boxes[3].released() == {UNCOVERED_ID_BASE: 500 + takes}


def test_a_group_that_the_graph_lacks_and_nobody_names_is_told() -> None:
    """A device's pacer knows groups by their number alone."""
    made, _ = coordinator(job((3,)), (3,))
    text = {"op": "all_reduce", "n_bytes": 8, "group_index": 99}
    with pytest.raises(UsageError, match="live rank 3 communicates in a group that it made after"):
        made.handle(3, Message(MessageKind.UNCOVERED, UNCOVERED_ID_BASE, 500, text))


def test_who_reads_nothing_yet_holds_up_nobody() -> None:
    """More answers than a socket takes are kept, and come whole and in order."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours, theirs = (Wire(end) for end in ends)
    for position in range(5_000):
        ours.post(Message(MessageKind.RELEASE, position, position * 10))
    assert ours.has_unsent
    found: list[Message] = []
    while len(found) < 5_000:
        found += theirs.receive(1.0) or ()
        ours.flush()
    assert found == [Message(MessageKind.RELEASE, n, n * 10) for n in range(5_000)]
    assert not ours.has_unsent
    for end in ends:
        end.close()


def test_a_hung_virtual_rank_is_named_to_those_that_wait() -> None:
    """Rank 1 stops in step 1: rank 0, of the same group, hears of it there."""
    graph = job((0,))
    hang = Faults(hang={1: 1})
    made, boxes = coordinator(graph, (0,), hang)
    trace = graph.classes[int(graph.class_of_R[0])].trace
    for x, start, _ in communications(graph, simulated(graph, (0,))[0]):
        made.handle(0, Message(MessageKind.ARRIVE, x, start))
        if boxes[0].faults():
            break
    assert x >= trace.n_prologue + trace.n_body
    assert "ranks 0, 2, 3 wait for rank 1: all_gather" in boxes[0].faults()[0]


def test_a_hung_live_rank_is_named_to_the_others() -> None:
    """It arrives at a time that does not come; its live peer is told at once."""
    graph = job((0, 1))
    made, boxes = coordinator(graph, (0, 1), Faults(hang={1: 0}))
    first = first_calls(graph)[0]
    made.handle(1, Message(MessageKind.ARRIVE, first, NEVER))
    made.handle(0, Message(MessageKind.ARRIVE, first, 1_000))
    assert "ranks 0, 2, 3 wait for rank 1" in boxes[0].faults()[0]
    assert boxes[0].released() == {}


def test_why_is_answered_only_when_nobody_can_help() -> None:
    """A live peer that still computes may yet come; one that is gone does not."""
    graph = job((0, 1))
    made, boxes = coordinator(graph, (0, 1))
    first = first_calls(graph)[0]
    made.handle(0, Message(MessageKind.ARRIVE, first, 1_000))
    made.handle(0, Message(MessageKind.WHY, first, 2_000))
    assert boxes[0].faults() == []
    made.gone(1)
    made.handle(0, Message(MessageKind.WHY, first, 3_000))
    assert "waits for rank" in boxes[0].faults()[0]


def test_a_rank_that_was_released_counts_as_running_again() -> None:
    """Rank 0 asked why, then went on to compute: rank 1, which waits for it, is not stuck."""
    graph = job((0, 1))
    made, boxes = coordinator(graph, (0, 1))
    first, second = first_calls(graph)[:2]
    made.handle(0, Message(MessageKind.ARRIVE, first, 1_000))
    made.handle(0, Message(MessageKind.WHY, first, 2_000))
    made.handle(1, Message(MessageKind.ARRIVE, first, 9_000))
    made.handle(1, Message(MessageKind.ARRIVE, second, 10_000))
    made.handle(1, Message(MessageKind.WHY, second, 20_000))
    assert boxes[1].faults() == []


def test_a_call_that_the_graph_lacks_is_answered_by_the_model_alone() -> None:
    """An all-reduce between steps."""
    made, boxes = coordinator(job((0,)), (0,))
    call = {"op": "all_reduce", "n_bytes": 1 << 20, "group_index": 1}
    made.handle(0, Message(MessageKind.UNCOVERED, 1 << 62, 5_000, call))
    assert boxes[0].released()[1 << 62] > 5_000


def test_the_job_ends_when_every_live_rank_has() -> None:
    """By saying goodbye, or by going without."""
    made, _ = coordinator(job((0, 3)), (0, 3))
    made.handle(0, Message(MessageKind.BYE))
    assert not made.finished
    made.gone(3)
    assert made.finished


def test_a_rank_that_is_gone_does_not_stop_the_others() -> None:
    """Its socket is closed; the rest still get their answers."""
    graph = job((0, 3))
    made, boxes = coordinator(graph, (0, 3))

    def closed(message: Message) -> None:
        raise BrokenPipeError

    boxes[3].send = closed  # type: ignore[method-assign]
    made.handle(
        3,
        Message(
            MessageKind.UNCOVERED, 1 << 62, 0, {"op": "barrier", "n_bytes": 0, "group_index": 1}
        ),
    )
    made.handle(
        0,
        Message(
            MessageKind.UNCOVERED, 1 << 62, 0, {"op": "barrier", "n_bytes": 0, "group_index": 1}
        ),
    )
    assert boxes[0].released()
