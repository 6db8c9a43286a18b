"""The process of one captured rank: ``python -m prismscale.capture.captured_rank SPEC``."""

from __future__ import annotations

import faulthandler
import hashlib
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from prismscale.analysis.memory.memory_log import save_memory_log
from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.first_message import FirstMessage
from prismscale.capture.recorder import Recorder
from prismscale.capture.stop_rules import CaptureControl, Control, CoRunControl, Ordinary
from prismscale.capture.witness import Witness, in_place_of
from prismscale.cost.launch_log import RecomputedPart, save_launch_log
from prismscale.devices.cpu import CpuDevice, CpuMemoryTracker
from prismscale.devices.cuda import CudaMemoryTracker, CudaStreams
from prismscale.devices.null.launch_reader import RecomputedParts, launch_log
from prismscale.devices.null.session import NullEmulation
from prismscale.devices.protocol import CaptureDevice, MemoryTracker, NullMemoryTracker
from prismscale.devices.router_watch import RouterWatch
from prismscale.devices.select import router_watch, start_device
from prismscale.devices.stream_device import StreamDevice
from prismscale.emulation.hook import CommunicationHook, GroupObserver, GroupObservers
from prismscale.emulation.script import ignore_breakpoints
from prismscale.emulation.step_detection import (
    watch_backward,
    watch_recomputation,
    watch_steps,
)
from prismscale.graph.facts import CaptureFacts, CoRunFacts, StepFacts
from prismscale.graph.io import save_trace, save_traces
from prismscale.graph.trace import RankTrace
from prismscale.host_comm.cohort_peers import CohortLoad
from prismscale.host_comm.local_work import CommunicationLoad, DeferredLoad, GlooLoad, NullLoad
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.chain import RankPayload, payload_of
from prismscale.payload.object_marks import marks_of
from prismscale.processes.children import die_with_parent
from prismscale.processes.failure import save_failure


def capture_rank(spec: CaptureSpec) -> RankTrace:
    """Run the program as one rank of the target job and return its trace."""
    ignore_breakpoints()
    emulation = start_device(spec)
    device, tracker = _instruments(spec.device, emulation)
    memory = tracker if spec.track_memory else NullMemoryTracker()
    payload = payload_of(spec, emulation, spec.is_captured_now)
    load = GlooLoad() if spec.communication_load else NullLoad()
    if spec.slice:
        return _capture_in_slice(spec, device, payload, load)
    late = DeferredLoad(load)
    recorder = Recorder(device, payload, load=late)
    witness = None
    if emulation is not None and not spec.whole:
        witness = Witness(Path(spec.out), device)
    control = CaptureControl(
        recorder,
        memory,
        late,
        spec.samples,
        emulation,
        witness,
        watched_steps=spec.watched_steps,
        least_steps=spec.least_steps,
    )
    again: list[RecomputedPart] = []
    memory.start()
    with ExitStack() as stack:
        if emulation is not None:
            stack.enter_context(emulation.around_program())
            parts = RecomputedParts(emulation.library, emulation.device, again)
            stack.enter_context(watch_recomputation(parts))
        hook: CommunicationHook = recorder
        if spec.tells_first_message:
            hook = FirstMessage(spec=spec, recorder=recorder)
        if emulation is not None:
            hook = emulation.outside.seen_by(hook)
        routers = _run(stack, spec, device, recorder, payload, hook, recorder, control)
    control.end_memory()
    payload.uses().save(spec.payload_path)
    if routers is not None:
        routers.save(spec.routers_path)
    trace = trace_of(spec, control, recorder, device)
    if control.followed is None:
        _save_unusual(spec, control.ordinary(), recorder, device)
    if emulation is not None and control.followed is None:
        (step,) = control.ordinary().parts()
        # The log leaves out the prologue, because only the step is costed again.
        log = launch_log(emulation.library, again).for_trace(
            prologue_stop=0, body_start=step.start, body_stop=step.stop
        )
        save_launch_log(log, spec.launches_path)
    if emulation is not None and spec.track_memory:
        history = emulation.memory.history.followed_log(spec.rank, recorder.stream.labels.all())
        save_memory_log(history, spec.memory_path)
    if emulation is not None:
        calls = trace.facts.calls_per_step
        # A rank that ended early ended with a step that repeats: it saves this last step.
        first = emulation.kernels.n_steps - calls
        if control.followed is None:
            first = trace.facts.calls_in_prologue
        emulation.save(spec.emulated_path, first, first + calls)
    return trace


def _capture_in_slice(
    spec: CaptureSpec, device: CaptureDevice, payload: RankPayload, alone: CommunicationLoad
) -> RankTrace:
    """Run the program beside other captured ranks: see :mod:`prismscale.host_comm.cohort_peers`."""
    cohort = CohortLoad(spec.rank, spec.slice, Path(spec.out), alone)
    recorder = Recorder(device, payload, load=cohort)
    control = CoRunControl(recorder, marks=spec.marks, samples=spec.samples)
    with ExitStack() as stack:
        observer = GroupObservers(cohort, recorder)
        _run(stack, spec, device, recorder, payload, recorder, observer, control)
    # Durations must be known before the trace is made: see [Note: when a node is final].
    cohort.resolve_durations(recorder.stream.steady_spans(device, control.ordinary().parts()))
    trace = trace_of(spec, control, recorder, device)
    node = spec.rank // spec.local_world_size
    beside = (r for r in spec.slice if r // spec.local_world_size == node)
    facts = CoRunFacts(
        issue_ns=cohort.issue_ns, common_jitter=cohort.common_jitter, ranks=tuple(beside)
    )
    return replace(trace, facts=replace(trace.facts, co_run=facts))


def _run(
    stack: ExitStack,
    spec: CaptureSpec,
    device: CaptureDevice,
    recorder: Recorder,
    payload: RankPayload,
    hook: CommunicationHook,
    observer: GroupObserver,
    control: Control,
) -> RouterWatch | None:
    """Run the program with all hooks installed; ``stack`` removes them when it closes.

    Returns:
        The watch that has noted the choices of the program's routers; None on a null device.
    """
    stack.enter_context(payload.in_force(Path(spec.payloads), while_true=spec.may_be_told))
    noting = payload.rules.noting_sites(hook)
    stack.enter_context(absent_peers(spec.environment, noting, observer, marks=marks_of(spec)))
    # First, because the step marker is imported from the program's search path.
    spec.script.set_up()
    stack.enter_context(watch_steps(control, spec.step_marker))
    stack.enter_context(watch_backward(recorder))
    routers = router_watch(spec)
    if routers is not None:
        stack.enter_context(routers.watching())
    stack.enter_context(device.observed(recorder))
    recorder.resume()
    spec.script.run()
    recorder.finish()
    return routers


def trace_of(
    spec: CaptureSpec, control: Control, recorder: Recorder, device: CaptureDevice
) -> RankTrace:
    """Return the rank's trace. Only the columns come from the recorded stream."""
    memory = control.memory_record if spec.track_memory else None
    groups, known_groups = tuple(recorder.groups), tuple(recorder.known_groups)
    if control.followed is not None:
        return in_place_of(control.followed, spec.rank, groups, known_groups, memory)
    ordinary = control.ordinary()
    columns = recorder.stream.columns(device, ordinary.parts())
    return RankTrace(
        rank=spec.rank,
        world_size=spec.world_size,
        groups=groups,
        known_groups=known_groups,
        **columns.by_name(),
        memory=memory,
        facts=CaptureFacts(
            device=spec.device,
            torch=torch.__version__,
            modelled=spec.device == "null",
            has_own_share=spec.communication_load,
            calls=len(recorder.stream.marks),
            calls_per_step=ordinary.calls,
            calls_in_prologue=(ordinary.samples[0].number - 1) * ordinary.calls,
            calls_tracked=control.memory_marks,
            watched_steps=len(ordinary.steps),
            unusual_steps=len(ordinary.unusual()),
        ),
    )


def _save_unusual(
    spec: CaptureSpec, ordinary: Ordinary, recorder: Recorder, device: CaptureDevice
) -> None:
    """Write the rank's unusual steps beside its trace, if it had any."""
    usual = ordinary.part(ordinary.samples[-1])
    found = []
    for step in ordinary.unusual():
        columns = recorder.stream.unusual_columns(device, ordinary.part(step), usual)
        work = hashlib.sha256(step.kind.encode()).hexdigest()
        found.append(
            RankTrace(
                rank=spec.rank,
                world_size=spec.world_size,
                groups=tuple(recorder.groups),
                known_groups=tuple(recorder.known_groups),
                **columns.by_name(),
                facts=CaptureFacts(step=StepFacts(number=step.number, work=work)),
            )
        )
    if found:
        save_traces(found, spec.unusual_path)


def _instruments(
    device: str, emulation: NullEmulation | None
) -> tuple[CaptureDevice, MemoryTracker]:
    if emulation is not None:
        return emulation.device, emulation.memory
    if device == "cuda":
        return StreamDevice(CudaStreams(), name=device), CudaMemoryTracker(per_step=True)
    return CpuDevice(), CpuMemoryTracker()


def main(arguments: list[str]) -> int:
    """Entry point of the process; returns its exit code."""
    die_with_parent()
    faulthandler.enable()  # a crash in native code leaves the Python frames in the rank's log
    path = Path(arguments[0])
    spec = CaptureSpec.load(path)
    try:
        with spec.followed(path):
            trace = capture_rank(spec)
        save_trace(trace, spec.trace_path)
    except BaseException as error:
        return save_failure(spec.error_path, spec.rank, error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
