"""The engine: computes when every node of every rank starts and ends.

A node starts at the latest end of its predecessors. A communication starts at the last arrival of
its members and ends one duration later; whatever time is left is waiting (PrismLLM section 4.3,
inter-slice calibration). One NumPy operation serves all members of a class and, if durations carry
a draw axis, all Monte Carlo draws. Classes run like processes that block on each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prismscale.durations.source import NEVER, Duration, DurationSource
from prismscale.errors import GraphError, StuckError
from prismscale.graph.node import NodeKind
from prismscale.sim.program import ClassProgram, JobProgram
from prismscale.sim.state import ClassState, CollectiveInstance, Times, earliest, latest
from prismscale.sim.stuck import Hang, describe_stuck, find_hangs

COMPUTE, RECV = int(NodeKind.COMPUTE), int(NodeKind.RECV)


class Progress(Protocol):
    """Decides when computation ends if that depends on how live ranks are running."""

    def ends(self, class_index: int, start: Times, duration: Duration) -> Times:
        """Return the ends of a class's computation."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """The state of a simulation: as much of its past as its future depends on."""

    classes: tuple[tuple[int, dict[int, Times], dict[int, int]], ...]
    """By class: next stream position, ends that are still needed, uses of each channel."""
    instances: dict[tuple[int, int], CollectiveInstance]


StepEnd = Callable[[int, int, Times], None]
"""Callback ``(class, step, end [..., M])`` for a node that no later node of its step waits for. The
step ends with the latest of these ends."""
NodeSeen = Callable[[int, int, Times, Times, Times], None]
"""Callback ``(class, stream position, start or own arrival, last arrival, end)``; each time is
``[..., M]``. A computation waits for no other rank: its last arrival is its start."""


class Engine:
    """Re-times a compiled job. Each class is advanced until it needs a side that has not arrived.

    Use :func:`prismscale.sim.timeline.simulate` unless ranks are live.
    """

    def __init__(
        self,
        job: JobProgram,
        durations: DurationSource,
        *,
        steps: int,
        with_prologue: bool = False,
        on_step_end: StepEnd | None = None,
        on_node: Mapping[int, NodeSeen] | None = None,
        external: Iterable[int] = (),
        watch_hangs: bool = False,
        progress: Progress | None = None,
        start: EngineState | None = None,
    ) -> None:
        """
        Args:
            job: the compiled job.
            durations: the duration of every node.
            steps: steps to run; :meth:`extend` adds more.
            with_prologue: start at the program's beginning instead of at its first steady step.
            on_step_end: called for each node that may be the last of its step.
            on_node: by class index; called for each node of the class as soon as its end is known.
            external: classes of live ranks, whose arrivals come through :meth:`arrive`.
            watch_hangs: record the arrivals at each communication, and collect groups that wait for
                ever in :attr:`hangs`.
            progress: decides when computation ends; None: computation takes its duration.
            start: the state of another engine of the same job, to go on from; ``steps`` includes
                the steps before it.
        """
        self._job = job
        self._durations = durations
        self._steps = steps
        self._with_prologue = with_prologue
        self._on_step_end = on_step_end
        self._on_node = dict(on_node or {})
        self._watch_hangs = watch_hangs
        self._progress = progress
        self._until_ns: int | None = None
        self._held: dict[int, int] = {}
        self._instances: dict[tuple[int, int], CollectiveInstance] = {}
        self._ready: deque[int] = deque()
        self._zero = np.zeros(1, dtype=np.int64)
        self.hangs: list[Hang] = []
        outside = set(external)
        self._states = [self._initial(p, p.index in outside) for p in job.classes]
        if start is not None:
            self._go_on_from(start)
        self._ready.extend(p.index for p in job.classes if p.index not in outside)

    def _initial(self, program: ClassProgram, external: bool) -> ClassState:
        start = 0 if self._with_prologue else program.n_prologue
        stop = program.n_prologue + self._steps * program.n_body
        return ClassState(program=program, position=start, stop=stop, external=external)

    def _go_on_from(self, start: EngineState) -> None:
        # Copied, because many engines may go on from one state, and each changes its own.
        for state, (position, ends, uses) in zip(self._states, start.classes, strict=True):
            state.position, state.ends, state.uses = position, dict(ends), dict(uses)
        self._instances = {key: instance.copied() for key, instance in start.instances.items()}

    def _load_durations(self, state: ClassState, x: int) -> None:
        """Set ``state.durations`` to those of the prologue or step that holds position ``x``."""
        program = state.program
        if x < program.n_prologue:
            state.durations, state.durations_base = self._durations.prologue(program.index), 0
        else:
            step, offset = divmod(x - program.n_prologue, program.n_body)
            state.durations = self._durations.body(program.index, step)
            state.durations_base = x - offset

    def extend(self, steps: int) -> None:
        """Let every class run until the end of ``steps`` steps; never reduces their number."""
        if steps <= self._steps:
            return
        self._steps = steps
        for state in self._states:
            # Computed before the stop moves: a blocked class must not run again until the node that
            # it waits for has ended.
            idle = state.position >= state.stop and not state.external
            state.stop = state.program.n_prologue + steps * state.program.n_body
            if idle:
                self._ready.append(state.program.index)

    def advance(self, until_ns: int | None = None) -> int | None:
        """Run every class as far as it can go.

        Computation that would begin after ``until_ns`` is held (None: no computation is held).

        Returns:
            When the first held computation would begin; None if none is held.
        """
        self._until_ns = until_ns
        # A class that was held at an earlier limit may go on now, or is held again.
        self._ready.extend(self._held)
        self._held.clear()
        while self._ready:
            self._run_class(self._states[self._ready.popleft()])
        return min(self._held.values(), default=None)

    def run(self) -> None:
        """Run every class to its last step.

        Raises:
            StuckError: some class cannot finish; the message names who waits for whom. Live classes
                need not finish, because the engine does not see their computation.
        """
        self.advance()
        if any(s.position < s.stop and not s.external for s in self._states):
            raise self.stuck()

    def arrive(self, class_index: int, position: int, time_ns: int) -> None:
        """Record that a live rank reached the communication at stream ``position`` of its class."""
        state = self._states[class_index]
        state.position = max(state.position, position + 1)
        self._meet(state, position, np.array([time_ns], dtype=np.int64))

    def stuck(self) -> StuckError:
        """Return the error that says why no class can advance."""
        return describe_stuck(self._job, self._states, self._instances)

    def ends_asked_for(self) -> dict[tuple[int, int], Times]:
        """Return the ends that later nodes need, by class and distance back from its next position.

        Ends of prologue nodes are left out.
        """
        return {
            (state.program.index, state.position - x): end
            for state in self._states
            for x, end in state.ends.items()
            if x >= state.program.n_prologue
        }

    def standing(self) -> EngineState:
        """Return the state of all classes, for another engine to go on from."""
        return EngineState(
            classes=tuple(
                (state.position, dict(state.ends), dict(state.uses)) for state in self._states
            ),
            instances={key: instance.copied() for key, instance in self._instances.items()},
        )

    def position_of(self, class_index: int) -> int:
        """Return the next stream position of a class."""
        return self._states[class_index].position

    def forget_before(self, class_index: int, position: int) -> None:
        """Drop the ends of nodes before ``position``, which a live rank will not ask for again."""
        ends = self._states[class_index].ends
        for x in [x for x in ends if x < position]:
            del ends[x]

    def end_of(self, class_index: int, position: int) -> Times | None:
        """Return the end of a node that is still needed, or None if it is not known (yet)."""
        return self._states[class_index].ends.get(position)

    def _run_class(self, state: ClassState) -> None:
        program, ends = state.program, state.ends
        prologue, n = program.n_prologue, program.n_prologue + program.n_body
        seen = self._on_node.get(program.index)
        first = 0 if self._with_prologue else prologue
        x = state.position
        while x < state.stop:
            # ``program.template``, written out: this loop is nearly all of the engine's time.
            i = x if x < n else prologue + (x - prologue) % program.n_body
            if i == prologue or not state.durations:
                self._load_durations(state, x)
            start: Times | None = None
            for distance in program.preds[i]:
                source = x - distance
                # The source lies before the first node. There all ranks start together at time 0.
                if source < first:
                    continue
                end = ends.get(source)
                # The source is a communication that other sides have not reached yet. The class
                # that completes it makes this class ready again.
                if end is None:
                    state.position, state.blocked_on = x, source
                    return
                start = end if start is None else np.maximum(start, end)
            if start is None:
                start = self._zero
            if program.kinds[i] == COMPUTE:
                if self._until_ns is not None and (begins := earliest(start)) > self._until_ns:
                    state.position, state.blocked_on = x, -1
                    self._held[program.index] = begins
                    return
                duration = state.durations[x - state.durations_base]
                if self._progress is None:
                    end = start + duration
                else:
                    end = self._progress.ends(program.index, start, duration)
                if program.kept[i]:
                    ends[x] = end
                if seen is not None:
                    seen(program.index, x, start, start, end)
                if program.ends_step[i] and self._on_step_end is not None:
                    self._on_step_end(program.index, (x - prologue) // program.n_body, end)
            else:
                self._meet(state, x, start)
            for distance in program.frees[i]:
                # In the first steps the body's distances reach back into the prologue, whose ends
                # the body may still need.
                if x - distance >= prologue or x < prologue:
                    ends.pop(x - distance, None)
            x += 1
        state.position, state.blocked_on = x, -1

    def _meet(self, state: ClassState, x: int, arrival: Times) -> None:
        program = state.program
        i = program.template(x)
        channel = program.channels[i]
        # The n-th use of a channel by one side meets the n-th use by every other side.
        count = state.uses.get(channel, 0)
        state.uses[channel] = count + 1
        key = (channel, count)
        instance = self._instances.get(key)
        if instance is None:
            instance = CollectiveInstance(channel, len(self._job.channels[channel].classes))
            self._instances[key] = instance
        plan = program.plans[i]
        if plan is None:
            raise GraphError(f"class {program.index}: node {i} is no communication")
        by_group = plan.to_groups(arrival)
        if program.speaks[i]:
            instance.duration = self._communication_ns(state, x)
        if self._watch_hangs or self._on_node:
            instance.arrivals.append((program.index, arrival))
        instance.present.append((program.index, x))
        held = instance.arrival_G
        instance.arrival_G = by_group if held is None else np.maximum(held, by_group)
        instance.missing -= 1
        if instance.missing == 0:
            del self._instances[key]
            self._conclude(instance)

    def _communication_ns(self, state: ClassState, x: int) -> Duration:
        # The class of a live rank is never run, so the durations of its step may not be loaded.
        if not 0 <= x - state.durations_base < len(state.durations):
            self._load_durations(state, x)
        return state.durations[x - state.durations_base]

    def _conclude(self, instance: CollectiveInstance) -> None:
        arrival = instance.arrival_G
        if arrival is None:
            raise GraphError("a communication without members")
        end_G = arrival + instance.duration
        if self._watch_hangs and latest(arrival) >= NEVER:
            self.hangs.extend(find_hangs(self._job, instance, NEVER))
        for index, x in instance.present:
            state = self._states[index]
            i = state.program.template(x)
            plan = state.program.plans[i]
            end_M = end_G if plan is None else plan.to_members(end_G)
            # A live rank asks for the end of each of its communications.
            if state.program.kept[i] or state.external:
                state.ends[x] = end_M
            if state.program.ends_step[i] and self._on_step_end is not None:
                step = (x - state.program.n_prologue) // state.program.n_body
                self._on_step_end(index, step, end_M)
            seen = self._on_node.get(index)
            if seen is not None:
                own = next(a for c, a in instance.arrivals if c == index)
                last = arrival if plan is None else plan.to_members(arrival)
                seen(index, x, own, last, end_M)
            # Other classes are running, are held, or first wait for another node.
            if state.blocked_on == x and not state.external:
                state.blocked_on = -1
                self._ready.append(index)
