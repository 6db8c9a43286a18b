"""Logical time of live ranks."""

from __future__ import annotations

import time

import pytest

from prismscale.emulation.logical_time import answering_time
from prismscale.live.clock import PacedClock, VirtualClock

SECOND = 10**9


@pytest.fixture
def paced() -> PacedClock:
    return PacedClock(time.perf_counter_ns())


@pytest.fixture
def virtual() -> VirtualClock:
    return VirtualClock(time.perf_counter_ns())


def test_a_paced_wait_ends_when_it_should(paced: PacedClock) -> None:
    """Never early, whatever the scheduler does."""
    end = paced.now_ns() + 2_000_000
    paced.wait_until(end)
    assert paced.now_ns() >= end


def test_a_wait_for_the_past_returns(paced: PacedClock) -> None:
    """At once, and time goes on."""
    before = paced.now_ns()
    paced.wait_until(-SECOND)
    assert paced.now_ns() >= before


def test_forgiven_lag_is_taken_out_of_logical_time(paced: PacedClock) -> None:
    """An hour of emulation is an hour that did not happen."""
    before = paced.now_ns()
    paced.forgive(3_600 * SECOND)
    assert paced.now_ns() < before - 3_000 * SECOND


def test_a_virtual_wait_jumps(virtual: VirtualClock) -> None:
    """An hour passes in no time, and never twice."""
    end = virtual.now_ns() + 3_600 * SECOND
    virtual.wait_until(end)
    assert virtual.now_ns() >= end
    virtual.wait_until(end - SECOND)
    assert virtual.now_ns() >= end


def test_the_program_reads_logical_time_on_the_virtual_clock(virtual: VirtualClock) -> None:
    """All six readings of the time module move with a wait that was skipped."""
    names = [n + s for n in ("time", "perf_counter", "monotonic") for s in ("", "_ns")]
    with answering_time(virtual.now_ns, virtual.pass_ns):
        before = {name: getattr(time, name)() for name in names}
        virtual.wait_until(virtual.now_ns() + 3_600 * SECOND)
        passed = {name: getattr(time, name)() - before[name] for name in names}
    assert all(3_600 <= passed[n] / (SECOND if n.endswith("_ns") else 1) < 3_700 for n in names)


def test_real_time_is_given_back(virtual: VirtualClock) -> None:
    """The functions of the time module are the very same again."""
    before = (time.time, time.perf_counter_ns, time.monotonic)
    with answering_time(virtual.now_ns, virtual.pass_ns):
        assert time.time is not before[0]
    assert (time.time, time.perf_counter_ns, time.monotonic) == before
