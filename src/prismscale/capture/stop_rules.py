"""How long a captured rank runs: until it has shown enough, or as long as its slice does."""

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
"""Nodes after which a rank is no longer watched for periodic events. Steps of large jobs take long,
and the limit must be the same on every machine."""
SETTLED = 2
"""Equal steps in a row after which a program counts as settled and memory tracking ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordinary:
    """The ordinary step of a program, and what else it did."""

    kind: str
    samples: tuple[Step, ...]
    """Steps whose durations count, oldest first."""
    steps: tuple[Step, ...]
    """All whole steps."""
    calls: int
    """Optimizer calls of a step."""
    warm_up: int = 0
    """Steps that the program made before it trained by CUDA graphs."""

    def parts(self) -> list[Sample]:
        """:attr:`samples` as parts of the stream."""
        return [self.part(step) for step in self.samples]

    def part(self, step: Step) -> Sample:
        """A step as a part of the stream."""
        before = self.steps[step.number - 2] if step.number > 1 else None
        follows = before is not None and before.kind == self.kind
        return Sample(start=step.start, stop=step.stop, follows_its_like=follows)

    def unusual(self) -> list[Step]:
        """Steps of other kinds since the first ordinary one."""
        first = next(s.number for s in self.steps if s.kind == self.kind)
        first = max(first, self.warm_up)
        return [s for s in self.steps if s.kind != self.kind and s.number > first]


class Control(StepListener, Protocol):
    """Listens to steps and ends the program."""

    memory_record: MemoryRecord | None
    memory_marks: int
    """Optimizer calls while memory was followed."""
    followed: RankTrace | None
    """The captured rank whose program this one has."""

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        ...

    def ordinary(self) -> Ordinary:
        """What the program's ordinary step is, after it ended, by itself or not."""
        ...


class CaptureControl:
    """Listens to steps: ends memory tracking once the program settles, and the program itself once
    enough ordinary steps were recorded.

    Steps that are timed come after memory tracking, which slows them. Where time is modelled every
    step takes the same: the one that settled is enough, and a rank that has done what another did
    up to there (see :mod:`prismscale.capture.witness`) ends a step earlier still. There a rank may
    be watched for some steps more, to see what happens only now and then. It is looked at anew, its
    memory too, when it captures a CUDA graph after its first steps.
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
        """``watched_steps``: where time is modelled, steps of the program to see at least.
        ``least_steps``: equal ones that it must have made when it ends by itself."""
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
        """Steps of the program when it had settled."""
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.followed: RankTrace | None = None
        """The captured rank whose program this one has."""

    def optimizer_begins(self) -> None:
        """Passed on to the recorder, and to who follows memory."""
        self._recorder.optimizer_begins()
        if self.memory_record is None:
            self._memory.optimizer_begins()

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count, and stop the program when it has shown enough."""
        self._recorder.optimizer_ended(optimizer)
        if self._emulation is not None:
            self._emulation.optimizer_ended()
        stream = self._recorder.stream
        calls = calls_per_step(stream.owners)
        if self.memory_record is None:
            self._memory.step_ended()
        if self._graphs.ended(len(stream.marks), calls):
            self._kind = None
        if self._kind is None:
            self._until_settled(calls)
        elif self._has_shown_enough():
            self.end_memory()
            raise StopProgram
        # Of a graph that may still be captured memory is followed, too.
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
        """Whether memory alone is asked for, and repeats: steps may differ in what they do."""
        if self._least_steps > 1 or self._emulation is None:
            return False
        return self._emulation.memory.repeats(calls)

    def _has_shown_enough(self) -> bool:
        stream = self._recorder.stream
        steps = steps_of(stream)
        # Within a step of several optimizer calls.
        if len(stream.marks) % calls_per_step(stream.owners):
            return False
        if self._emulation is not None:
            return len(steps) >= self._watched_steps or len(stream.nodes) >= MOST_WATCHED_NODES
        # One more than is sampled: the first one after tracking still warms caches.
        later = [s for s in steps[self._settled_at :] if s.kind == self._kind]
        return len(later) > self._samples

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        if self.memory_record is None:
            self.memory_record = self._memory.stop()
            # Only now: see [Note: the pair's buffers] in host_comm/local_work.py.
            self._load.start()
            self.memory_marks = len(self._recorder.stream.marks)

    def ordinary(self) -> Ordinary:
        """The ordinary step: where time is modelled the one with which the program settled, else
        the last ones that were timed.

        Raises:
            UsageError: the program did not repeat itself.
        """
        stream = self._recorder.stream
        steps, calls = steps_of(stream), calls_per_step(stream.owners)
        warm_up = self._graphs.steps(calls)
        # A program that ends with its warm-up has shown nothing else.
        warm_up = warm_up if len(steps) - warm_up >= SETTLED else 0
        kind = self._kind or _kind_at_the_end(steps[warm_up:], stream, self._least_steps)
        alike = [s for s in steps[warm_up:] if s.kind == kind]
        # Steps after it were watched for unusual ones only.
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
    """The ordinary kind of a program that ended before it had settled: its last steps are equal, or
    one kind has come ``least`` times."""
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
    """Ends the program where all ranks of its slice end theirs. Its steps are known from ranks that
    ran alone, and so is its memory."""

    def __init__(self, recorder: Recorder, *, marks: int, samples: int) -> None:
        self._recorder, self._marks, self._samples = recorder, marks, samples
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.followed: RankTrace | None = None

    def optimizer_begins(self) -> None:
        """Passed on to the recorder."""
        self._recorder.optimizer_begins()

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count, and stop the program where its slice does."""
        self._recorder.optimizer_ended(optimizer)
        if len(self._recorder.stream.marks) >= self._marks:
            raise StopProgram
        self._recorder.resume()

    def end_memory(self) -> None:
        """It was not followed."""

    def ordinary(self) -> Ordinary:
        """The ordinary steps among its last ones. Raises :class:`UsageError` where the program
        ended before."""
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
