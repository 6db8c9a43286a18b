"""Replays all virtual ranks around the live ones.

The engine runs ahead of every live rank as far as causality allows: a class stops at the first node
that needs a live arrival which has not come. When a live rank arrives, everything else that its
group needs is already known, so the answer costs one maximum. A late live rank makes everyone late.
A virtual rank never arrives earlier than its own predecessors allow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.collective import CollectiveModel
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.source import NEVER
from prismscale.errors import UsageError
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import CollectiveOp
from prismscale.live.coordinator.drift import DriftingDurations, MachineSpeed, captured_compute_ns
from prismscale.live.coordinator.rank_jitter import CommonJitter
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.sim.engine import COMPUTE, Engine
from prismscale.sim.program import JobProgram
from prismscale.sim.state import latest

LOOKAHEAD_STEPS = 2
"""Number of steps that virtual ranks may be ahead of the furthest live rank."""


@dataclass(kw_only=True)
class LiveRank:
    """A live rank as the coordinator sees it."""

    rank: int
    wire: Wire
    rank_class: RankClass
    told: dict[int, int] = field(default_factory=dict)
    """Arrival time by position, kept here until earlier communications on the lane have ended."""
    waiting: set[int] = field(default_factory=set)
    """Positions of arrivals that are not released yet."""
    blocked: bool = False
    finished: bool = False


class Coordinator:
    """Runs the engine and answers live ranks."""

    def __init__(
        self,
        job: JobProgram,
        durations: GraphDurations,
        model: CollectiveModel,
        live: Sequence[int],
        *,
        follow_speed: bool = False,
        jitter: CommonJitter | None = None,
    ) -> None:
        """
        Args:
            job: the compiled job.
            durations: durations of all nodes.
            model: answers communications that the graph does not have.
            live: the live ranks.
            follow_speed: ranks share this processor; see [Note: machine drift].
            jitter: the jitter that ranks share, if it was measured; see [Note: common jitter].
        """
        self._job = job
        self._model = model
        graph = job.graph
        self._classes = {r: graph.classes[int(graph.class_of_R[r])] for r in live}
        self._ranks: dict[int, LiveRank] = {}
        self._steps = LOOKAHEAD_STEPS
        self._jitter = jitter
        self._speed = MachineSpeed(
            captured_ns={r: captured_compute_ns(c.trace) for r, c in self._classes.items()}
        )
        drifting = DriftingDurations(durations=durations, speed=self._speed)
        self._engine = Engine(
            job,
            drifting if follow_speed else durations,
            steps=self._steps,
            with_prologue=True,
            external=[c.index for c in self._classes.values()],
            watch_hangs=bool(durations.faults.hang),
            progress=jitter,
        )

    @property
    def expected(self) -> int:
        """Number of live ranks that must say hello."""
        return len(self._classes)

    def join(self, rank: int, wire: Wire) -> None:
        """Add a live rank that is ready."""
        self._ranks[rank] = LiveRank(rank=rank, wire=wire, rank_class=self._classes[rank])

    def go(self) -> None:
        """Begin the job: all live ranks are there."""
        processes = {rank: live.wire.process for rank, live in self._ranks.items()}
        origin = time.perf_counter_ns()
        for live in self._ranks.values():
            others = [pid for rank, pid in processes.items() if pid and rank != live.rank]
            _send(live, Message(MessageKind.GO, 0, origin, {"processes": others}))
        # Virtual ranks begin while live ones still build their models.
        self._engine.advance()

    def handle(self, rank: int, message: Message) -> None:
        """Act on one message."""
        live = self._ranks[rank]
        if message.kind == MessageKind.ARRIVE:
            self._arrive(live, message)
        elif message.kind == MessageKind.UNCOVERED:
            self._uncovered(live, message)
        elif message.kind == MessageKind.COMPUTED:
            self._speed.observe(rank, message.time_ns)
        elif message.kind == MessageKind.WHY:
            live.blocked = True
            # Computation that was held back is needed now.
            self._engine.advance()
            self._sweep()
            self._explain(live, message.position)
        elif message.kind == MessageKind.BYE:
            self.gone(rank)

    def gone(self, rank: int) -> None:
        """Note that a live rank's process ended."""
        self._ranks[rank].finished = True
        # The other ranks may have to go on without the arrivals that it would have told.
        self._sweep()

    @property
    def finished(self) -> bool:
        """True once no live rank is left."""
        return all(r.finished for r in self._ranks.values())

    def _arrive(self, live: LiveRank, message: Message) -> None:
        trace = live.rank_class.trace
        live.blocked = False
        # Before the engine goes on, because the speed of virtual ranks follows from it.
        if self._jitter is not None and message.time_ns < NEVER:
            factor = self._speed.factor
            self._jitter.observe(
                live.rank, message.position, message.time_ns, message.computed_ns, factor
            )
        live.told[message.position] = message.time_ns
        live.waiting.add(message.position)
        step = (message.position - trace.n_prologue) // trace.n_body
        if step + LOOKAHEAD_STEPS > self._steps:
            self._steps = step + LOOKAHEAD_STEPS
            self._engine.extend(self._steps)
        self._sweep()

    def _sweep(self) -> None:
        """Pass arrivals to the engine and release ended communications until nothing changes."""
        moved = True
        while moved:
            moved = False
            for live in self._ranks.values():
                if self._enter(live):
                    # If all other members have come, the end is known. It is sent before virtual
                    # ranks are advanced, so that the live rank's computation hides that work.
                    self._release(live)
                    moved = True
            self._advance()
            for live in self._ranks.values():
                moved |= self._release(live)
            # Another round helps only arrivals that wait for their lane.
            moved = moved and any(live.told for live in self._ranks.values())

    def _advance(self) -> None:
        """Advance virtual ranks as far as it is known how fast the machine ran.

        If no live rank can go on then, advance them further until one can.
        """
        if self._jitter is None:
            self._engine.advance()
            return
        later = self._engine.advance(self._jitter.known_ns)
        while later is not None and not any(self._may_go_on(r) for r in self._ranks.values()):
            later = self._engine.advance(later)

    def _may_go_on(self, live: LiveRank) -> bool:
        """Whether a live rank goes on without any end that is still unknown."""
        if live.finished:
            return False
        ends = [self._engine.end_of(live.rank_class.index, p) for p in live.waiting]
        return all(end is not None for end in ends)

    def _enter(self, live: LiveRank) -> bool:
        entered = False
        for position in sorted(live.told):
            start = self._lane_free(live, position)
            if start is None:
                # Later arrivals wait too, because the engine counts a channel's uses in the order
                # of arrivals.
                break
            # The communication starts when its lane is free.
            time_ns = max(live.told.pop(position), start)
            self._engine.arrive(live.rank_class.index, position, time_ns)
            entered = True
        return entered

    def _lane_free(self, live: LiveRank, position: int) -> int | None:
        """Time at which earlier communications on the node's lane end; None if still unknown."""
        program = self._job.classes[live.rank_class.index]
        free = 0
        for distance in program.preds[program.template(position)]:
            before = position - distance
            if before < 0 or program.kinds[program.template(before)] == COMPUTE:
                continue
            if before in live.told:
                return None
            end = self._engine.end_of(live.rank_class.index, before)
            if end is None:
                if before in live.waiting:
                    return None
                # The engine has forgotten it, because it ended steps ago.
                continue
            free = max(free, latest(end))
        return free

    def _release(self, live: LiveRank) -> bool:
        released = False
        for position in sorted(live.waiting):
            end = self._engine.end_of(live.rank_class.index, position)
            if end is None:
                continue
            live.waiting.discard(position)
            live.blocked = False
            released = True
            time_ns = latest(end)
            if time_ns >= NEVER:
                self._fault(live, self._hang_text())
            else:
                _send(live, Message(MessageKind.RELEASE, position, time_ns))
        if released and not live.waiting:
            # Keep the ends of the last two steps: the next communications on their lanes need them.
            horizon = max(live.rank_class.trace.n_body, 1)
            newest = self._engine.position_of(live.rank_class.index)
            self._engine.forget_before(live.rank_class.index, newest - 2 * horizon)
        return released

    def _uncovered(self, live: LiveRank, message: Message) -> None:
        text = message.text or {}
        op = CollectiveOp[str(text["op"]).upper()]
        table = self._uncovered_ranks(live, text)
        duration = self._model.duration_ns(op, int(text["n_bytes"]), table)
        end = message.time_ns + int(np.max(duration))
        if end >= NEVER:
            self._fault(live, self._hang_text())
        else:
            _send(live, Message(MessageKind.RELEASE, message.position, end))

    def _uncovered_ranks(self, live: LiveRank, text: dict[str, Any]) -> NDArray[np.int64]:
        """Ranks (``[K, 1]``) of a communication that the graph does not have.

        Raises:
            UsageError: its group is not in the graph either, and the live rank did not name it.
        """
        if "ranks" in text:
            return np.array(text["ranks"], dtype=np.int64)[:, np.newaxis]
        index, slots = int(text["group_index"]), live.rank_class.slots
        if index >= len(slots):
            raise UsageError(
                f"live rank {live.rank} communicates in a group that it made after its captured "
                f"steps (its group {index}): make the group before the training begins, or run "
                "fewer --steps"
            )
        column = int(slots[index].group_M[0])
        return self._job.graph.families[slots[index].family].ranks_KG[:, [column]]

    def _explain(self, live: LiveRank, position: int) -> None:
        """If the communication at ``position`` can never end, tell all live ranks why."""
        # A rank that still computes may yet arrive.
        running = [r for r in self._ranks.values() if not (r.finished or r.blocked)]
        if running or position not in live.waiting:
            return
        error = self._engine.stuck()
        for other in self._ranks.values():
            self._fault(other, str(error))

    def _fault(self, live: LiveRank, summary: str) -> None:
        _send(live, Message(MessageKind.FAULT, 0, 0, {"summary": summary[:200_000]}))

    def _hang_text(self) -> str:
        lines = list(dict.fromkeys(h.sentence() for h in self._engine.hangs))
        hung = sorted({r for h in self._engine.hangs for r in h.missing})
        return (
            f"the job hangs: first missing are ranks {hung[:8]}. On a cluster the process group's "
            "timeout would end it. Groups that wait:\n  " + "\n  ".join(lines)
        )


def _send(live: LiveRank, message: Message) -> None:
    """Send a message to a live rank. If it is gone, mark it so: the others still need answers."""
    if live.finished:
        return
    try:
        live.wire.post(message)
    except OSError:
        live.finished = True
