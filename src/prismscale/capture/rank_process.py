"""The process of one captured rank: ``python -m prismscale.capture.rank_process SPEC``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from prismscale.capture.backends import install
from prismscale.capture.contention import GlooLoad, LateLoad, NullLoad
from prismscale.capture.device.cpu import CpuDevice, CpuMemoryTracker
from prismscale.capture.device.cuda import CudaMemoryTracker, CudaStreams
from prismscale.capture.device.null.emulation import NullEmulation
from prismscale.capture.device.protocol import CaptureDevice, MemoryTracker, NullMemoryTracker
from prismscale.capture.device.start import start_device
from prismscale.capture.device.streams import StreamDevice
from prismscale.capture.failure import save_failure
from prismscale.capture.objects import MIRROR
from prismscale.capture.rank_payload import rank_payload
from prismscale.capture.recorder import Recorder
from prismscale.capture.script import StopProgram, ignore_breakpoints
from prismscale.capture.spec import CaptureSpec
from prismscale.capture.steps import find_steady, watch_steps
from prismscale.capture.witness import Witness, in_place_of
from prismscale.cost.durations import COMMUNICATION, OWN_SHARE
from prismscale.errors import UsageError
from prismscale.graph.store import save_trace
from prismscale.graph.trace import MemoryRecord, RankTrace
from prismscale.processes import die_with_parent

SETTLED = 2
"""Equal steps in a row after which a program counts as settled and memory tracking ends."""


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


def capture_rank(spec: CaptureSpec) -> RankTrace:
    """Run the program as one rank of the target job and return its trace."""
    ignore_breakpoints()
    emulation = start_device(spec)
    device, tracker = _instruments(spec.device, emulation)
    memory = tracker if spec.track_memory else NullMemoryTracker()
    payload = rank_payload(Path(spec.payloads), emulation, is_captured_now=spec.is_captured_now)
    load = LateLoad(GlooLoad() if spec.communication_load else NullLoad())
    recorder = Recorder(device, payload, load=load)
    witness = None
    if emulation is not None:
        witness = Witness(Path(spec.out), device, rank=spec.rank, world_size=spec.world_size)
    control = CaptureControl(recorder, memory, load, spec.samples, emulation, witness)
    memory.start()
    with ExitStack() as stack:
        if emulation is not None:
            stack.enter_context(emulation.around_program())
        stack.enter_context(MIRROR.stages.shared_in(Path(spec.payloads)))
        stack.enter_context(install(spec.environment, recorder, recorder))
        # The marker is found from where the program imports.
        spec.script.set_up()
        stack.enter_context(watch_steps(control, spec.step_marker))
        stack.enter_context(recorder.watching_backward())
        stack.enter_context(device.observed(recorder))
        recorder.resume()
        spec.script.run()
        recorder.finish()
    control.end_memory()
    trace = _trace(spec, control, recorder, device)
    if emulation is not None:
        emulation.save(spec.emulated_path, int(trace.meta["period"]))
    return trace


def _trace(
    spec: CaptureSpec, control: CaptureControl, recorder: Recorder, device: CaptureDevice
) -> RankTrace:
    memory = control.memory_record if spec.track_memory else None
    groups, known_groups = recorder.groups, recorder.known_groups
    if control.followed is not None:
        return in_place_of(control.followed, spec.rank, groups, known_groups, memory)
    period, samples = control.settle()
    return recorder.stream.to_trace(
        device,
        rank=spec.rank,
        world_size=spec.world_size,
        groups=groups,
        known_groups=known_groups,
        period=period,
        samples=samples,
        memory=memory,
        meta={
            "device": spec.device,
            "torch": torch.__version__,
            "durations": "modelled" if spec.device == "null" else "measured",
            "memory_marks": str(control.memory_marks),
            "period": str(period),
            **({COMMUNICATION: OWN_SHARE} if spec.communication_load else {}),
            "prologue_marks": str(len(recorder.stream.marks) - period * samples),
        },
    )


def _instruments(
    device: str, emulation: NullEmulation | None
) -> tuple[CaptureDevice, MemoryTracker]:
    if emulation is not None:
        return emulation.device, emulation.memory
    if device == "cuda":
        return StreamDevice(CudaStreams(), name=device), CudaMemoryTracker(per_step=True)
    return CpuDevice(), CpuMemoryTracker()


def main(arguments: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    die_with_parent()
    spec = CaptureSpec.load(Path(arguments[0]))
    try:
        save_trace(capture_rank(spec), spec.trace_path)
    except BaseException as error:
        return save_failure(spec.error_path, spec.rank, error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
