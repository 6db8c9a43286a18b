"""Process of one rank whose peers run too.

It is started as ``python -m prismscale.switching.switched_rank SPEC``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch.distributed import Work

from prismscale.capture.captured_rank import trace_of
from prismscale.capture.recorder import Recorder
from prismscale.capture.step_kinds import calls_per_step, most_ordinary, steps_of
from prismscale.capture.stop_rules import Ordinary
from prismscale.devices.cpu import CpuDevice, CpuMemoryTracker
from prismscale.devices.protocol import MemoryTracker, NullMemoryTracker
from prismscale.devices.router_watch import RouterWatch
from prismscale.emulation.background import is_background
from prismscale.emulation.hook import Collective, GroupObservers
from prismscale.emulation.install import install
from prismscale.emulation.script import StopProgram, ignore_breakpoints
from prismscale.emulation.step_detection import watch_backward, watch_steps
from prismscale.emulation.work import completed
from prismscale.errors import UsageError
from prismscale.graph.io import save_trace
from prismscale.graph.trace import MemoryRecord, RankTrace
from prismscale.payload.mirror import MirrorPayload
from prismscale.payload.object_marks import marked_objects, marks_of
from prismscale.payload.recordings.recording_writer import RecordingWriter
from prismscale.processes.children import die_with_parent
from prismscale.processes.failure import save_failure
from prismscale.switching.questions import Questions
from prismscale.switching.rank_keys import SharedKeys
from prismscale.switching.real_exchange import RealExchange
from prismscale.switching.spilled_memory import SpilledMemory
from prismscale.switching.switched_spec import SwitchedSpec

TRACKED = 4
"""Number of optimizer calls during which memory is tracked, because tracking slows the program."""


class SwitchedControl:
    """Stops the program after ``marks`` optimizer calls, the same number on all ranks."""

    def __init__(
        self, recorder: Recorder, memory: MemoryTracker, *, marks: int, samples: int
    ) -> None:
        self._recorder, self._memory = recorder, memory
        self._marks, self._samples = marks, samples
        self.memory_record: MemoryRecord | None = None
        self.memory_marks = 0
        self.followed: RankTrace | None = None

    def optimizer_begins(self) -> None:
        """Pass the call on to the recorder."""
        self._recorder.optimizer_begins()

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count the call, and stop the program after the last wanted one."""
        self._recorder.optimizer_ended(optimizer)
        if self.memory_record is None:
            self._memory.step_ended()
        if len(self._recorder.stream.marks) >= TRACKED:
            self.end_memory()
        if len(self._recorder.stream.marks) >= self._marks:
            raise StopProgram
        self._recorder.resume()

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        if self.memory_record is None:
            self.memory_record = self._memory.stop()
            self.memory_marks = len(self._recorder.stream.marks)

    def ordinary(self) -> Ordinary:
        """Return the most frequent step. Where values decide, no two steps need be equal.

        Raises:
            UsageError: the program made no step.
        """
        stream = self._recorder.stream
        steps = steps_of(stream)
        if not steps:
            raise UsageError(
                "the program ended without an optimizer step; name the function that ends a step "
                "with --step-marker module:function"
            )
        kind = most_ordinary(steps)
        alike = [s for s in steps if s.kind == kind]
        later = alike[1:] if len(alike) > self._samples else alike
        return Ordinary(
            kind=kind,
            samples=tuple(later[-self._samples :]),
            steps=tuple(steps),
            calls=calls_per_step(stream.owners),
        )


class ForegroundAndBackground:
    """Records communications of training. Those of background threads are only performed."""

    def __init__(self, recorder: Recorder, exchange: RealExchange) -> None:
        self._recorder, self._exchange = recorder, exchange

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """See :class:`prismscale.emulation.hook.CommunicationHook`."""
        if not is_background():
            return self._recorder.communicate(batch)
        self._exchange.take(self._exchange.give(batch), batch)
        return completed(tuple(t for c in batch for t in c.outputs))


def run_rank(spec: SwitchedSpec) -> tuple[RankTrace, bool]:
    """Run the program as one rank. Returns its trace, and whether it made all wanted steps."""
    ignore_breakpoints()
    spilled = SpilledMemory(Path(spec.values), spec.spilled_bytes) if spec.spilled_bytes else None
    questions = Questions(spec.address, spec.rank, spilled)
    device = CpuDevice()
    memory = CpuMemoryTracker() if spec.track_memory else NullMemoryTracker()
    writer = _writer(spec)
    exchange = RealExchange(
        questions,
        Path(spec.values),
        spec.rank,
        writer,
        step=lambda: len(recorder.stream.marks),
    )
    # No rank is absent, so the mirror is never asked.
    recorder = Recorder(device, MirrorPayload(), load=exchange)
    control = SwitchedControl(recorder, memory, marks=spec.marks, samples=spec.samples)
    memory.start()
    with ExitStack() as stack:
        hook = ForegroundAndBackground(recorder, exchange)
        observer = GroupObservers(exchange, recorder)
        keys = _shared_keys(spec, questions)
        stack.enter_context(install(spec.environment, hook, observer, keys))
        stack.enter_context(marked_objects(marks_of(spec)))
        spec.script.set_up()
        stack.enter_context(watch_steps(control, spec.step_marker))
        stack.enter_context(watch_backward(recorder))
        routers = RouterWatch(spec.routing, spec.device)
        stack.enter_context(routers.watching())
        stack.enter_context(device.observed(recorder))
        recorder.resume()
        spec.script.run()
        recorder.finish()
    if writer is not None:
        writer.close()
    control.end_memory()
    routers.save(spec.routers_path)
    stopped = len(recorder.stream.marks) >= spec.marks
    return trace_of(spec, control, recorder, device), stopped


def _writer(spec: SwitchedSpec) -> RecordingWriter | None:
    if not spec.record:
        return None
    limit = spec.record_limit_bytes
    return RecordingWriter(spec.recordings, spec.rank, spec.record, limit)


def _shared_keys(spec: SwitchedSpec, questions: Questions) -> Callable[[str], SharedKeys]:
    return lambda address: SharedKeys(spec.environment, questions, address)


def main(arguments: list[str]) -> int:
    """Entry point of the process. Returns the exit code."""
    die_with_parent()
    path = Path(arguments[0])
    spec = SwitchedSpec.load(path)
    try:
        with spec.followed(path):
            trace, stopped = run_rank(spec)
        save_trace(trace, spec.trace_path)
        if stopped:
            spec.stopped_path.touch()
    except BaseException as error:
        return save_failure(spec.error_path, spec.rank, error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
