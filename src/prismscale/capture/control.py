"""How long a captured rank runs: until it has shown enough, or as long as its slice does."""

from __future__ import annotations

from typing import Protocol

from prismscale.capture.contention import LateLoad
from prismscale.capture.device.null.emulation import NullEmulation
from prismscale.capture.device.protocol import MemoryTracker
from prismscale.capture.recorder import Recorder
from prismscale.capture.script import StopProgram
from prismscale.capture.steps import StepListener, find_steady
from prismscale.capture.witness import Witness
from prismscale.errors import UsageError
from prismscale.graph.trace import MemoryRecord, RankTrace

SETTLED = 2
"""Equal steps in a row after which a program counts as settled and memory tracking ends."""


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

    def settle(self) -> tuple[int, int]:
        """Period and samples to use after the program ended, by itself or not."""
        ...


class CaptureControl:
    """Listens to steps: ends memory tracking once the program settles, and the program itself once
    enough steady steps were recorded.

    Steps that are timed come after memory tracking, which slows them. Where time is modelled every
    step takes the same: the one that settled is enough, and a rank that has done what another did
    up to there (see :mod:`prismscale.capture.witness`) ends a step earlier still.
    """

    def __init__(
        self,
        recorder: Recorder,
        memory: MemoryTracker,
        load: LateLoad,
        samples: int,
        emulation: NullEmulation | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._recorder = recorder
        self._memory = memory
        self._load = load
        self._emulation = emulation
        self._witness = witness
        self._samples = samples if emulation is None else 1
        self._timed_from: int | None = None
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.period: int | None = None
        self.followed: RankTrace | None = None
        """The captured rank whose program this one has."""

    def optimizer_begins(self) -> None:
        """Passed on to the recorder."""
        self._recorder.optimizer_begins()

    def optimizer_ended(self) -> None:
        """Count, and stop the program when it has shown enough."""
        self._recorder.optimizer_ended()
        if self._emulation is not None:
            self._emulation.optimizer_ended()
        stream = self._recorder.stream
        if self._timed_from is None:
            self._memory.step_ended()
            if self._witness is not None:
                self.followed = self._witness.recognise(stream, self._recorder.groups)
            if self.followed is not None:
                raise StopProgram
            if len(stream.marks) > SETTLED and find_steady(stream, SETTLED):
                self.end_memory()
                self._timed_from = len(stream.marks)
                if self._emulation is not None:
                    raise StopProgram
        else:
            # One period more than is sampled: the first one after tracking still warms caches.
            self.period = find_steady(stream, self._samples + 1, since=self._timed_from)
            if self.period is not None:
                raise StopProgram
        self._recorder.resume()

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        if self.memory_record is None:
            self.memory_record = self._memory.stop()
            self._load.start()
            self.memory_marks = len(self._recorder.stream.marks)

    def settle(self) -> tuple[int, int]:
        """Period and samples to use after the program ended, by itself or not.

        Raises:
            UsageError: the program did not repeat itself.
        """
        if self.period is not None:
            return self.period, self._samples
        stream = self._recorder.stream
        for repeats in range(self._samples + 1, 1, -1):
            period = find_steady(stream, repeats)
            if period is not None:
                # The first of the repeats has no mark before it when it is the program's first.
                whole = repeats if len(stream.marks) > period * repeats else repeats - 1
                return period, min(self._samples, whole)
        raise UsageError(
            f"the program ended after {len(stream.marks)} optimizer calls, and 2 equal steps are "
            "needed; let it run longer, or name the function that ends a step with "
            "--step-marker module:function"
        )


class SliceControl:
    """Ends the program where all ranks of its slice end theirs. Its steps are known from ranks that
    ran alone, and so is its memory."""

    def __init__(self, recorder: Recorder, *, period: int, marks: int, samples: int) -> None:
        self._recorder, self._period, self._marks = recorder, period, marks
        self._samples = samples
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.followed: RankTrace | None = None

    def optimizer_begins(self) -> None:
        """Passed on to the recorder."""
        self._recorder.optimizer_begins()

    def optimizer_ended(self) -> None:
        """Count, and stop the program where its slice does."""
        self._recorder.optimizer_ended()
        if len(self._recorder.stream.marks) >= self._marks:
            raise StopProgram
        self._recorder.resume()

    def end_memory(self) -> None:
        """It was not followed."""

    def settle(self) -> tuple[int, int]:
        """As told. Raises :class:`UsageError` where the program ended before."""
        made = len(self._recorder.stream.marks)
        if made < self._marks:
            raise UsageError(
                f"the program made {made} optimizer calls beside other captured ranks, and "
                f"{self._marks} alone: it has to run equally long on all ranks"
            )
        return self._period, self._samples
