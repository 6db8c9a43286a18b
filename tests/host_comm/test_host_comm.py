"""What a program computes beside its communications, and what of its time is waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts, CoRunFacts
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.host_comm.compute_clock import ProgramTime, RunQueue
from prismscale.host_comm.local_work import NullLoad
from prismscale.host_comm.transport import COMPUTES_NS
from prismscale.live.overlap import Overlap


def trace(beside_ns: int, issue_ns: int | None = None) -> RankTrace:
    """Two all-reduces a step: one with a computation of ``beside_ns`` before its wait, and one that
    is awaited at once."""
    builder = TraceBuilder(rank=0, world_size=2, groups=[GroupRecord(ranks=(0, 1))])
    last = builder.add_compute(1)
    builder.begin_body()
    first = builder.add_communication(CollectiveOp.ALL_REDUCE, 8, group_index=0, preds=[last])
    last = builder.add_compute(beside_ns, preds=[last])
    last = builder.add_compute(10 * COMPUTES_NS, preds=[last, first])
    second = builder.add_communication(CollectiveOp.ALL_REDUCE, 8, group_index=0, preds=[last])
    builder.add_compute(10 * COMPUTES_NS, preds=[last, second])
    if issue_ns is None:
        return builder.build()
    co_run = CoRunFacts(issue_ns=issue_ns, common_jitter=0.0, ranks=())
    return builder.build(facts=CaptureFacts(co_run=co_run))


FIRST, SECOND = 1, 4


def test_work_beside_a_long_computation_matters() -> None:
    """It slows the computation down; in every step."""
    overlap = Overlap(trace(COMPUTES_NS, issue_ns=7))
    assert overlap.matters([FIRST])
    assert overlap.matters([FIRST + 5])
    assert overlap.issue_ns == 7


def test_work_that_is_waited_for_soon_does_not() -> None:
    """However much is computed after the wait."""
    overlap = Overlap(trace(COMPUTES_NS - 1, issue_ns=7))
    assert not overlap.matters([FIRST])
    assert not overlap.matters([SECOND])
    assert not overlap.matters([SECOND + 5])


def test_a_rank_that_was_captured_beside_the_pair_runs_beside_it() -> None:
    """Always: its durations are those of such a rank."""
    assert Overlap(trace(0)).matters([SECOND])


def test_what_the_trace_does_not_know_matters() -> None:
    """The prologue, and what is uncovered; a batch counts as one."""
    overlap = Overlap(trace(0, issue_ns=7))
    assert overlap.matters([0])
    assert overlap.matters([SECOND, 0])


class Busy(NullLoad):
    """A load that takes the core."""

    interrupts = True


def waiting_ns(load: NullLoad, *, computed_ns: int, interrupted_ns: int) -> int:
    """Waiting in the time of a program that computed so long, and whose thread stood still."""
    program = ProgramTime()
    waiting = program.waiting_since(load)
    program.computed_ns, program.interrupted_ns = computed_ns, interrupted_ns
    return waiting()


def test_interruptions_that_exceed_the_computation_are_waiting() -> None:
    """By as much as they exceed it."""
    assert waiting_ns(Busy(), computed_ns=10, interrupted_ns=50) == 40


def test_interruptions_of_a_computation_are_its_own() -> None:
    """It was slowed down."""
    assert waiting_ns(Busy(), computed_ns=200, interrupted_ns=10) == 0


def test_where_no_load_takes_the_core_nothing_is_waiting() -> None:
    """A program that sleeps does so on the cluster as well."""
    assert waiting_ns(NullLoad(), computed_ns=0, interrupted_ns=20) == 0


def test_a_thread_that_stands_still_is_interrupted() -> None:
    """What its own clock has done since it went on is computation; the rest is not."""
    program = ProgramTime()
    program.go()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    computed_ns = time.thread_time_ns()
    began_ns = time.perf_counter_ns()
    time.sleep(0.05)
    slept_ns = time.perf_counter_ns() - began_ns - (time.thread_time_ns() - computed_ns)
    program.stop()
    # Rounded: the clocks are read one after the other.
    assert program.computed_ns >= 20_000_000
    assert program.interrupted_ns >= 0.9 * slept_ns


def test_a_program_that_goes_on_in_another_thread_was_not_interrupted() -> None:
    """What its threads computed is not known."""
    program = ProgramTime()
    waiting_ns = program.waiting_since(Busy())
    program.go()
    time.sleep(0.02)
    other = threading.Thread(target=program.stop)
    other.start()
    other.join()
    assert waiting_ns() == 0
    assert program.computed_ns >= 20_000_000


def delayed_on_the_first_core(queue: RunQueue) -> tuple[float, float]:
    """How long, in ms, this thread was delayed while asleep, and while it computed."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        queue.go()
        time.sleep(0.1)
        asleep_ns = queue.delayed_ns()
        queue.go()
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        return asleep_ns / 1e6, queue.delayed_ns() / 1e6
    finally:
        os.sched_setaffinity(0, cores)
        queue.close()


BUSY = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def compute():
    while True:
        pass
threading.Thread(target=compute).start()
"""
"""Computes on the first core without end, and not in its first thread."""


@pytest.fixture
def processes() -> Iterator[tuple[int, int]]:
    """One that computes without end, and one that sleeps."""
    with (
        subprocess.Popen([sys.executable, "-c", BUSY]) as busy,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as idle,
    ):
        time.sleep(1.0)
        yield busy.pid, idle.pid
        busy.kill()
        idle.kill()


def test_what_another_process_takes_of_the_core_is_told_from_sleep(
    processes: tuple[int, int],
) -> None:
    """Sleep is no delay, however busy the machine; to share a core is."""
    busy, idle = processes
    asleep_ms, beside_ms = delayed_on_the_first_core(RunQueue([busy]))
    _, beside_nobody_ms = delayed_on_the_first_core(RunQueue([idle]))
    assert beside_ms > asleep_ms
    assert beside_ms > 5 * beside_nobody_ms


def test_any_of_several_processes_may_have_had_the_core(processes: tuple[int, int]) -> None:
    """The coordinator, and other live ranks."""
    busy, idle = processes
    _, of_both_ms = delayed_on_the_first_core(RunQueue([idle, busy]))
    _, of_one_ms = delayed_on_the_first_core(RunQueue([idle]))
    assert of_both_ms > 5 * of_one_ms


def test_a_process_that_ended_is_forgotten(processes: tuple[int, int]) -> None:
    """The others still count."""
    busy, idle = processes
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as short:
        queue = RunQueue([idle, short.pid, busy])
        short.kill()
    queue.go()
    assert queue.delayed_ns() == 0
    _, of_one_ms = delayed_on_the_first_core(RunQueue([idle]))
    assert delayed_on_the_first_core(queue)[1] > 5 * of_one_ms


def test_without_another_process_nothing_was_taken() -> None:
    """Nor is it known of one that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        before = RunQueue([ended.pid])
        before.go()
    for queue in (RunQueue(), RunQueue([ended.pid]), before):
        queue.go()
        assert queue.delayed_ns() == 0
        queue.close()
