"""Live ranks: the unmodified program among replayed peers, its faults, and other live ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prismscale.durations.source import NEVER
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import StuckError
from prismscale.graph.facts import CaptureFacts, CoRunFacts
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.local_work import DurationCallback, LocalWork, NoWork, NullLoad
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.live.exchange import Exchange
from prismscale.live.host_hook import LiveHook
from prismscale.live.overlap import Overlap
from prismscale.live.trace_cursor import TraceCursor
from prismscale.payload.mirror import MirrorPayload
from support.emulation import all_reduce
from support.runs import Ended, results, run_job, write_program
from support.traces import loop_trace

WORLD = 4
ALL = GroupHandle(group_index=0, ranks=tuple(range(WORLD)), group_rank=1, name="", backend="nccl")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run with ranks 0 and 1 live, in the same group."""
    folder = tmp_path_factory.mktemp("live")
    script = write_program(folder / "program")
    done = run_job(folder / "run", WORLD, "--live", "0,1", script)
    assert done.code == 0, done.err
    return folder / "run", done


def test_two_live_ranks_really_add_up(observed: tuple[Path, Ended]) -> None:
    """1 and 2 contribute themselves and stand in for one virtual peer each: 2 · 1 + 2 · 2."""
    assert set(re.findall(r"together (.*)", observed[1].out)) == {"6.0"}


def test_the_programs_own_output_is_passed_on_with_its_rank(
    observed: tuple[Path, Ended],
) -> None:
    """Every line of every live rank, to the last."""
    lines = re.findall(r"^\[rank (\d)\] together", observed[1].out, re.MULTILINE)
    assert lines.count("0") == lines.count("1") >= 5


def test_live_ranks_are_observed_for_the_steps_asked_for(observed: tuple[Path, Ended]) -> None:
    """Three steady steps of each, nothing that the graph does not have."""
    live = results(observed[0])["live"]
    assert [r["rank"] for r in live] == [0, 1]
    assert all(len(r["step_ns"]) == 3 and r["uncovered"] == 0 for r in live)
    assert all(r["boot_s"] > 0 and min(r["step_ns"]) > 0 for r in live)


def test_a_finished_live_stage_is_reused(observed: tuple[Path, Ended]) -> None:
    """The same command again runs no process and finds the same."""
    out, before = observed[0], results(observed[0])["live"]
    (log,) = out.glob("logs/live-rank-0.log")
    log.unlink()
    script = json.loads(next(out.glob("live/*/live-0.spec.json")).read_text())["target"]
    done = run_job(out, WORLD, "--live", "0,1", script)
    assert done.code == 0
    assert results(out)["live"] == before
    assert not log.exists()


class ManualClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        """Now."""
        return self.now

    def wait_until(self, end_ns: int) -> None:
        """Jump."""
        self.now = max(self.now, end_ns)

    def forgive(self, lag_ns: int) -> None:
        """Go back."""
        self.now -= lag_ns


class ScriptedWire:
    """A coordinator that releases everything ``late_ns`` after it arrived."""

    def __init__(self, late_ns: int = 0, answer: MessageKind = MessageKind.RELEASE) -> None:
        self.sent: list[Message] = []
        self._late_ns, self._answer = late_ns, answer

    def send(self, message: Message) -> None:
        """Keep."""
        self.sent.append(message)

    def receive(self, timeout_s: float | None) -> list[Message] | None:
        """Answer the last message."""
        last = self.sent[-1]
        end = last.time_ns + self._late_ns
        return [Message(self._answer, last.position, end, {"summary": "rank 3 hangs"})]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make_hook(clock: ManualClock, wire: ScriptedWire, folder: Path, factor: float = 1) -> LiveHook:
    """Rank 1 of four, whose program all-reduces one float over and over."""
    hook = LiveHook(
        cursor=TraceCursor(loop_trace(WORLD, 4)),
        wire=wire,  # type: ignore[arg-type]
        clock=clock,
        payload=MirrorPayload(),
        exchange=Exchange(folder=folder, rank=1, live=frozenset({1})),
        load=NullLoad(),
        overlap=Overlap(loop_trace(WORLD, 4)),
        compute_factor=factor,
    )
    hook.group_created(ALL.ranks, "", "nccl", 0)
    return hook


def test_a_phase_takes_as_long_as_hoped(clock: ManualClock, tmp_path: Path) -> None:
    """100 ns at twice, then 100 ns at half the time, on a rank that is three times as slow."""
    hook = make_hook(clock, ScriptedWire(), tmp_path, factor=3)
    hook.communicate([all_reduce(ALL)])
    hook.enter_phase(2.0)
    clock.now += 100
    hook.enter_phase(0.5)
    assert clock.now == 600
    clock.now += 100
    hook.communicate([all_reduce(ALL)])
    assert clock.now == 600 + 150


def test_what_comes_before_a_factor_is_none_of_its(clock: ManualClock, tmp_path: Path) -> None:
    """Computation at its own pace, which nobody stretched, stays what it was."""
    hook = make_hook(clock, ScriptedWire(), tmp_path)
    hook.communicate([all_reduce(ALL)])
    clock.now += 100
    hook.enter_phase(2.0)
    clock.now += 10
    hook.communicate([all_reduce(ALL)])
    assert clock.now == 120


CONNECT = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(sys.argv[1])
connection.recv(1)
"""
"""Connects, and stays until the other side closes."""


def test_who_listens_and_who_connects_know_each_other(tmp_path: Path) -> None:
    """The coordinator and a live rank are the processes behind a socket."""
    place = str(tmp_path / "socket")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        listener.bind(place)
        listener.listen(2)
        connection.connect(place)
        assert Wire(connection).process == os.getpid()
        listener.accept()[0].close()
        with subprocess.Popen([sys.executable, "-c", CONNECT, place]) as other:
            accepted, _ = listener.accept()
            assert Wire(accepted).process == other.pid
            accepted.close()


def reduce_one(*, asynchronous: bool = False) -> Collective:
    """An all-reduce of one float."""
    return all_reduce(ALL, asynchronous=asynchronous)


def test_a_synchronous_call_returns_at_its_calibrated_end(
    clock: ManualClock, tmp_path: Path
) -> None:
    """With the sum over the mirrored peers, the waiting counted."""
    hook = make_hook(clock, ScriptedWire(late_ns=700), tmp_path)
    call = reduce_one()
    hook.communicate([call])
    assert (clock.now, hook.waited_ns) == (700, 700)
    assert call.outputs[0].item() == WORLD


@dataclass
class SlowToStart(NoWork):
    """A share of the work whose start takes the whole of it, and its load."""

    clock: ManualClock
    takes_ns: int
    # What really interrupts the test is no part of its manual clock.
    interrupts = False

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """This."""
        return self

    def answers(self, collective: Collective) -> bool:
        """Nobody takes part."""
        return False

    def begin(self) -> None:
        """All is done at once."""
        self.clock.now += self.takes_ns


@pytest.mark.parametrize("takes_ns", [300, 900])
def test_a_synchronous_call_does_not_wait_for_the_later_of_two_draws(
    clock: ManualClock, tmp_path: Path, takes_ns: int
) -> None:
    """It ends when the coordinator says, however long the rank's share takes here to start."""
    hook = make_hook(clock, ScriptedWire(late_ns=700), tmp_path)
    hook.load = SlowToStart(clock, takes_ns)
    hook.communicate([reduce_one()])
    assert (clock.now, hook.waited_ns, hook.lag_ns) == (700, 700, max(0, takes_ns - 700))


def test_a_call_that_is_waited_for_at_once_costs_only_its_issue(
    clock: ManualClock, tmp_path: Path
) -> None:
    """Its work was really done when it was captured; here nobody would notice it."""
    hook = make_hook(clock, ScriptedWire(late_ns=700), tmp_path)
    hook.load = SlowToStart(clock, 900)
    co_run = CoRunFacts(issue_ns=40, common_jitter=0.0, ranks=())
    hook.overlap = Overlap(replace(loop_trace(WORLD, 4), facts=CaptureFacts(co_run=co_run)))
    work = hook.communicate([reduce_one(asynchronous=True)])
    assert clock.now == 40
    work.wait()
    assert (clock.now, hook.waited_ns, hook.lag_ns) == (700, 660, 0)


def test_an_asynchronous_call_overlaps_what_follows(clock: ManualClock, tmp_path: Path) -> None:
    """Only what is left of it is waited for."""
    hook = make_hook(clock, ScriptedWire(late_ns=700), tmp_path)
    work = hook.communicate([reduce_one(asynchronous=True)])
    clock.now += 500
    assert not work.is_completed()
    work.wait()
    assert (clock.now, hook.waited_ns) == (700, 200)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1_000), (1.5, 1_500), (0.25, 250)])
def test_a_slow_rank_computes_longer_in_logical_time(
    clock: ManualClock, tmp_path: Path, factor: float, expected: int
) -> None:
    """The time since the last communication is stretched, the start-up before the first is not."""
    wire = ScriptedWire()
    hook = make_hook(clock, wire, tmp_path, factor)
    clock.now = 50
    hook.communicate([reduce_one()])
    clock.now += 1_000
    hook.communicate([reduce_one()])
    assert [m.time_ns for m in wire.sent] == [50, 50 + expected]


def test_a_hung_rank_never_arrives(clock: ManualClock, tmp_path: Path) -> None:
    """The coordinator hears of an arrival that does not come, and says what that means."""
    wire = ScriptedWire(answer=MessageKind.FAULT)
    hook = make_hook(clock, wire, tmp_path)
    hook.hung = True
    with pytest.raises(StuckError, match="rank 3 hangs"):
        hook.communicate([reduce_one()])
    assert wire.sent[0].time_ns == NEVER


def test_a_coordinator_that_is_gone_ends_the_wait(clock: ManualClock, tmp_path: Path) -> None:
    """Not a wait for ever."""
    wire = ScriptedWire()
    wire.receive = lambda timeout_s: None  # type: ignore[method-assign]
    with pytest.raises(StuckError, match="the coordinator ended"):
        make_hook(clock, wire, tmp_path).communicate([reduce_one()])


def test_a_program_that_polls_finds_the_outputs(clock: ManualClock, tmp_path: Path) -> None:
    """It never waits: when a poll says that it is over, they are there."""
    hook = make_hook(clock, ScriptedWire(late_ns=100), tmp_path)
    call = reduce_one(asynchronous=True)
    call.outputs[0].fill_(1.0)
    work = hook.communicate([call])
    assert not work.is_completed()
    clock.now = 100
    assert work.is_completed()
    assert call.outputs[0].item() == WORLD


def test_a_call_that_the_capture_lacks_is_told_as_such(clock: ManualClock, tmp_path: Path) -> None:
    """At a step's border: an evaluation that the captured steps did not hold."""
    wire = ScriptedWire(late_ns=10)
    hook = make_hook(clock, wire, tmp_path)
    call = reduce_one()
    call.op = CollectiveOp.BARRIER
    hook.communicate([call])
    assert [m.kind for m in wire.sent] == [MessageKind.UNCOVERED]
    told = {"op": "barrier", "n_bytes": 4, "group_index": 0, "ranks": [0, 1, 2, 3]}
    assert wire.sent[0].text == told
    assert hook.cursor.uncovered == 1
