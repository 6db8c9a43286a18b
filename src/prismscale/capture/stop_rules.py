"""Decides how long a captured rank runs: until enough steps are known, or as long as its slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prismscale.capture.graph_warm_up import GraphWarmUp
from prismscale.capture.node_stream import NodeStream, Sample
from prismscale.capture.recorder import Recorder
from prismscale.capture.step_kinds import (
    Step,
    calls_per_step,
    most_ordinary,
    ordinary_kind,
    steps_of,
)
from prismscale.capture.witness import Witness
from prismscale.devices.null.session import NullEmulation
from prismscale.devices.protocol import MemoryTracker
from prismscale.emulation.script import StopProgram
from prismscale.emulation.step_detection import StepListener
from prismscale.errors import UsageError
from prismscale.graph.trace import MemoryRecord, RankTrace
from prismscale.host_comm.local_work import DeferredLoad

MOST_WATCHED_NODES = 40_000
"""Number of nodes after which a rank is no longer watched for periodic events.

Steps of large jobs take long, and the limit must be the same on every machine."""
SETTLED = 2
"""Equal steps in a row after which a program counts as settled and memory tracking ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordinary:
    """The ordinary step of a program, and all its other steps."""

    kind: str
    samples: tuple[Step, ...]
    """Steps whose durations count, oldest first."""
    steps: tuple[Step, ...]
    """All complete steps."""
    calls: int
    """Optimizer calls in one step."""
    warm_up: int = 0
    """Number of steps that the program made before it trained by CUDA graphs."""

    def parts(self) -> list[Sample]:
        """Return :attr:`samples` as parts of the stream."""
        return [self.part(step) for step in self.samples]

    def part(self, step: Step) -> Sample:
        """Return a step as a part of the stream."""
        before = self.steps[step.number - 2] if step.number > 1 else None
        follows = before is not None and before.kind == self.kind
        return Sample(start=step.start, stop=step.stop, follows_its_like=follows)

    def unusual(self) -> list[Step]:
        """Return the steps of other kinds after the first ordinary one and the warm-up."""
        first = next(s.number for s in self.steps if s.kind == self.kind)
        first = max(first, self.warm_up)
        return [s for s in self.steps if s.kind != self.kind and s.number > first]


class Control(StepListener, Protocol):
    """Listens to steps and ends the program."""

    memory_record: MemoryRecord | None
    memory_marks: int
    """Number of optimizer calls while memory was tracked."""
    followed: RankTrace | None
    """The trace of the captured rank that runs the same program, if one was found."""

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        ...

    def ordinary(self) -> Ordinary:
        """Return the program's ordinary step, once the program has ended or was stopped."""
        ...


class CaptureControl:
    """Ends memory tracking once the program has settled, and the program after enough steps.

    Steps are timed only after memory tracking, because tracking slows them. Where time is modelled,
    every ordinary step takes the same time, so the step with which the program settled is enough. A
    rank that has done the same as another rank up to there (see :mod:`prismscale.capture.witness`)
    ends one step earlier still. Where time is modelled a rank may also be watched for some more
    steps, to see periodic events. If the program captures a CUDA graph after its first steps, it is
    examined anew, its memory too.
    """

    def __init__(
        self,
        recorder: Recorder,
        memory: MemoryTracker,
        load: DeferredLoad,
        samples: int,
        emulation: NullEmulation | None = None,
        witness: Witness | None = None,
        *,
        watched_steps: int = 0,
        least_steps: int = SETTLED,
    ) -> None:
        """``watched_steps``: where time is modelled, the least number of steps to run.
        ``least_steps``: equal steps that the program must have made when it ends by itself."""
        self._recorder = recorder
        self._memory = memory
        self._load = load
        self._emulation = emulation
        self._witness = witness
        self._watched_steps = watched_steps
        self._least_steps = least_steps
        self._samples = samples if emulation is None else 1
        self._graphs = GraphWarmUp(emulation)
        self._kind: str | None = None
        self._settled_at = 0
        """Number of steps that the program had made when it settled."""
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.followed: RankTrace | None = None
        """The trace of the captured rank that runs the same program, if one was found."""

    def optimizer_begins(self) -> None:
        """Tell the recorder, and the memory tracker while memory is tracked."""
        self._recorder.optimizer_begins()
        if self.memory_record is None:
            self._memory.optimizer_begins()

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count the call, and stop the program once enough steps are known."""
        self._recorder.optimizer_ended(optimizer)
        if self._emulation is not None:
            self._emulation.optimizer_ended()
        stream = self._recorder.stream
        calls = calls_per_step(stream.owners)
        if self.memory_record is None:
            self._memory.step_ended()
        if self._graphs.ended(len(stream.marks), calls):
            self._kind, self._settled_at = None, 0
        if self._kind is None:
            self._until_settled(calls)
        elif self._has_shown_enough():
            self.end_memory()
            raise StopProgram
        # Tracking goes on while a graph may still be captured, to follow the graph's memory too.
        if self._kind is not None and not self._graphs.may_come(len(stream.marks) // calls):
            self.end_memory()
        self._recorder.resume()

    def _until_settled(self, calls: int) -> None:
        stream = self._recorder.stream
        if self._witness is not None:
            self.followed = self._witness.recognise(stream, self._recorder.groups)
        if self.followed is not None:
            raise StopProgram
        steps = steps_of(stream)
        if self._graphs.is_to_come(len(steps)):
            return
        if self._is_memory_known(calls):
            self.end_memory()
            raise StopProgram
        if len(stream.marks) > SETTLED:
            self._kind = ordinary_kind(stream, steps, SETTLED, self._graphs.steps(calls))
        if self._kind is not None:
            self._settled_at = len(steps)
            if self._emulation is not None and self._has_shown_enough():
                self.end_memory()
                raise StopProgram

    def _is_memory_known(self, calls: int) -> bool:
        """Return whether only memory is wanted and it repeats; the steps' work may still differ."""
        if self._least_steps > 1 or self._emulation is None:
            return False
        return self._emulation.memory.repeats(calls)

    def _has_shown_enough(self) -> bool:
        stream = self._recorder.stream
        steps = steps_of(stream)
        # The program is within a step of several optimizer calls.
        if len(stream.marks) % calls_per_step(stream.owners):
            return False
        if self._emulation is not None:
            return len(steps) >= self._watched_steps or len(stream.nodes) >= MOST_WATCHED_NODES
        # One step more than is sampled: the first one after memory tracking still warms caches.
        later = [s for s in steps[self._settled_at :] if s.kind == self._kind]
        return len(later) > self._samples

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        if self.memory_record is None:
            self.memory_record = self._memory.stop()
            # Not before tracking has ended: see [Note: the pair's buffers] in
            # host_comm/local_work.py.
            self._load.start()
            self.memory_marks = len(self._recorder.stream.marks)

    def ordinary(self) -> Ordinary:
        """Return the ordinary step, with the steps whose durations count.

        Where time is modelled this is the step with which the program settled, else the last ones
        that were timed.

        Raises:
            UsageError: the program did not repeat itself.
        """
        stream = self._recorder.stream
        steps, calls = steps_of(stream), calls_per_step(stream.owners)
        warm_up = self._graphs.steps(calls)
        # If a program ends with its warm-up, these steps are all there is.
        warm_up = warm_up if len(steps) - warm_up >= SETTLED else 0
        kind = self._kind or _kind_at_the_end(steps[warm_up:], stream, self._least_steps)
        alike = [s for s in steps[warm_up:] if s.kind == kind]
        # Later steps only served to find unusual ones.
        if self._emulation is not None and self._settled_at:
            alike = [s for s in alike if s.number <= self._settled_at]
        elif len(alike) > self._samples:
            alike = alike[1:]
        return Ordinary(
            kind=kind,
            samples=tuple(alike[-self._samples :]),
            steps=tuple(steps),
            calls=calls,
            warm_up=warm_up,
        )


def _kind_at_the_end(steps: Sequence[Step], stream: NodeStream, least: int = SETTLED) -> str:
    """Return the ordinary kind of a program that ended before it had settled.

    It must have come ``least`` times. Raises :class:`UsageError` otherwise.
    """
    counts = Counter(s.kind for s in steps)
    kind = most_ordinary(steps) if steps else ""
    if not steps or counts[kind] < least:
        calls, needed = len(stream.marks), "2 equal steps are" if least > 1 else "a whole step is"
        raise UsageError(
            f"the program ended after {calls} optimizer call{'s' * (calls != 1)}, and {needed} "
            "needed; let it run longer, or name the function that ends a step with "
            "--step-marker module:function"
        )
    return kind


class CoRunControl:
    """Ends the program after as many optimizer calls as all ranks of its slice make.

    Its steps and its memory are already known from ranks that ran alone.
    """

    def __init__(self, recorder: Recorder, *, marks: int, samples: int) -> None:
        self._recorder, self._marks, self._samples = recorder, marks, samples
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.followed: RankTrace | None = None

    def optimizer_begins(self) -> None:
        """Tell the recorder."""
        self._recorder.optimizer_begins()

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count the call, and stop the program where all ranks of its slice stop."""
        self._recorder.optimizer_ended(optimizer)
        if len(self._recorder.stream.marks) >= self._marks:
            raise StopProgram
        self._recorder.resume()

    def end_memory(self) -> None:
        """Do nothing: memory is not tracked in a slice."""

    def ordinary(self) -> Ordinary:
        """Return the ordinary step, sampled in the last steps of its kind.

        Raises:
            UsageError: the program ended before its slice did.
        """
        stream = self._recorder.stream
        if len(stream.marks) < self._marks:
            raise UsageError(
                f"the program made {len(stream.marks)} optimizer calls beside other captured "
                f"ranks, and {self._marks} alone: it has to run equally long on all ranks"
            )
        steps = steps_of(stream)
        kind = _kind_at_the_end(steps, stream)
        alike = [s for s in steps if s.kind == kind]
        return Ordinary(
            kind=kind,
            samples=tuple(alike[-self._samples :]),
            steps=tuple(steps),
            calls=calls_per_step(stream.owners),
        )
