"""The process of one live rank: ``python -m prismscale.live.live_rank SPEC``."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from prismscale.analysis.observation import Observation
from prismscale.analysis.payload_use import all_uses
from prismscale.devices.cpu import CpuMemoryTracker
from prismscale.devices.cuda import CudaMemoryTracker
from prismscale.devices.null.session import NullEmulation
from prismscale.devices.protocol import MemoryTracker, NullMemoryTracker
from prismscale.devices.select import claim_device, router_watch, start_device
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.emulation.logical_time import answering_time
from prismscale.emulation.script import StopProgram, ignore_breakpoints
from prismscale.emulation.step_detection import (
    watch_backward,
    watch_recomputation,
    watch_steps,
)
from prismscale.errors import StuckError
from prismscale.graph.io import load_trace
from prismscale.graph.trace import MemoryRecord, RankTrace
from prismscale.host_comm.compute_clock import RunQueue
from prismscale.host_comm.local_work import DeferredLoad, GlooLoad, NullLoad
from prismscale.live.clock import Clock, PacedClock, VirtualClock
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.live.exchange import Exchange
from prismscale.live.hook_base import LiveHookBase, StepEnd
from prismscale.live.hoped_hook import HopedHook, LeftOut, OneStream, Phases
from prismscale.live.host_hook import LiveHook
from prismscale.live.live_spec import Begun, LiveSpec
from prismscale.live.null_hook import HostExchange, NullClock, NullLiveHook
from prismscale.live.overlap import Overlap
from prismscale.live.real_part import RealPart
from prismscale.live.stream_hook import streamed_hook
from prismscale.live.trace_cursor import TraceCursor
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.chain import payload_of
from prismscale.payload.object_marks import marks_of
from prismscale.processes.children import die_with_parent, end_now
from prismscale.processes.failure import save_failure
from prismscale.typed_files import save_json


class LiveControl:
    """Listens to steps: observes them, and stops the program after the last one."""

    def __init__(
        self,
        hook: LiveHookBase,
        clock: Clock,
        memory: MemoryTracker,
        load: DeferredLoad,
        trace: RankTrace,
        steps: int,
        hang_step: int | None = None,
        emulation: NullEmulation | None = None,
    ) -> None:
        self.phases: Phases | None = None
        """What-ifs on phases of the program, if it computes on this machine's CPU."""
        self._hang_step = hang_step
        self._emulation = emulation
        self._hook, self.clock, self._memory = hook, clock, memory
        self.memory_record: MemoryRecord | None = None
        self._load = load
        self._period = trace.facts.calls_per_step
        self._memory_marks = trace.facts.calls_tracked
        self._prologue_marks = trace.facts.calls_in_prologue
        self._last_mark = self._prologue_marks + steps * self._period
        self._marks = 0

    def optimizer_begins(self) -> None:
        """Note that the optimizer phase begins."""
        if self.phases is not None:
            self.phases.optimizer_begins()

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count the call, and note the end of a step."""
        if self.phases is not None:
            self.phases.optimizer_ended()
        self._marks += 1
        if self._emulation is not None:
            self._emulation.optimizer_ended()
        if self._marks <= self._memory_marks:
            self._memory.step_ended()
        # Memory tracking ends where the capture's ended. From there on the gloo pair works: see
        # [Note: the pair's buffers] in host_comm/local_work.py.
        if self._marks == self._memory_marks:
            self.end_memory()
        if self.at_step_end:
            self._hook.step_ended()
        if self._marks >= self._last_mark:
            raise StopProgram
        if self.at_step_end:
            steps = (self._marks - self._prologue_marks) // self._period
            self._hook.hung = steps == self._hang_step or self._hook.hung

    @property
    def at_step_end(self) -> bool:
        """Whether the optimizer call that ended last is the end of the prologue or of a step."""
        since = self._marks - self._prologue_marks
        return since >= 0 and since % self._period == 0

    def is_steady(self) -> bool:
        """Whether the prologue has ended."""
        return self._marks >= self._prologue_marks

    def end_memory(self) -> None:
        """Stop tracking memory; safe to call again."""
        if self.memory_record is None:
            self.memory_record = self._memory.stop()
        self._load.start()


def run_live(spec: LiveSpec, path: Path) -> Observation:
    """Run the program as the live rank of ``spec``, which is the file at ``path``."""
    if not spec.attached:
        ignore_breakpoints()
    hoped = WhatIfs.parse(spec.what_ifs)
    emulation = start_device(spec, hoped.kernels)
    if emulation is not None:
        emulation.kernels.slowness = spec.compute_factor
    trace = load_trace(Path(spec.trace))
    # Before the job begins, so that it takes none of the rank's time.
    real = RealPart.of(spec) if spec.device == "cpu" else RealPart()
    load = DeferredLoad(GlooLoad() if spec.communication_load else NullLoad())
    wire, begun = _begin(spec)
    clock = _clock(spec, begun.origin_ns, emulation)
    cursor = TraceCursor(trace)
    payload = payload_of(spec, emulation)
    exchange_of = Exchange if emulation is None else HostExchange
    exchange = exchange_of(folder=Path(spec.exchange), rank=spec.rank, live=frozenset(spec.live))
    parts: dict[str, Any] = {
        "cursor": cursor,
        "wire": wire,
        "payload": payload,
        "exchange": exchange,
        "load": load,
        "compute_factor": spec.compute_factor,
    }
    hook: LiveHookBase
    if spec.device == "cuda":
        hook = streamed_hook(spec, wire, begun.origin_ns, cursor, payload, exchange, load)
    elif isinstance(clock, NullClock):
        hook = NullLiveHook(clock=clock, overlap=Overlap(trace), **parts)
    else:
        queue = RunQueue(begun.others)
        hook = LiveHook(
            clock=clock,
            overlap=Overlap(trace),
            queue=queue,
            transfers=real.transfers,
            have_links=spec.transfers.have_links,
            recorded=real.recorded,
            **parts,
        )
    memory = NullMemoryTracker() if trace.memory is None else _memory_tracker(spec, emulation)
    control = LiveControl(hook, clock, memory, load, trace, spec.steps, spec.hang_step, emulation)
    if isinstance(hook, LiveHook) and emulation is None and hoped.kernels:
        control.phases = Phases(hook=hook, hoped=hoped)
    memory.start()
    with ExitStack() as stack:
        stack.enter_context(spec.followed(path, begun=begun))
        # Entered early and so left late: gates open however the program ends.
        stack.callback(hook.close)
        if emulation is not None:
            stack.enter_context(emulation.around_program())
        elif isinstance(clock, VirtualClock):
            stack.enter_context(answering_time(clock.now_ns, clock.pass_ns))
        stack.enter_context(payload.in_force(Path(spec.payloads)))
        answering = hook if emulation is None else emulation.outside.seen_by(hook)
        stream = clock if isinstance(clock, NullClock) else OneStream()
        felt = HopedHook(answering=answering, payload=payload, hoped=hoped, stream=stream)
        if emulation is not None and not hoped.recomputes:
            without_cost = emulation.library.ps_without_cost
            left = LeftOut(hook=felt, is_steady=control.is_steady, without_cost=without_cost)
            stack.enter_context(watch_recomputation(left))
        if control.phases is not None:
            stack.enter_context(watch_backward(control.phases))
        answers = payload.rules.noting_sites(felt)
        objects = not spec.objects_are_recorded
        peers = absent_peers(spec.environment, answers, hook, objects=objects, marks=marks_of(spec))
        stack.enter_context(peers)
        # Before watch_steps: the step marker is imported as the program would import it.
        spec.script.set_up()
        stack.enter_context(watch_steps(control, spec.step_marker))
        if (routers := router_watch(spec)) is not None:
            stack.enter_context(routers.watching())
        spec.script.run()
        # Before the stack closes the hook, and with it the pacer that has seen the steps.
        steps = hook.finish()
    control.end_memory()
    wire.send(Message(MessageKind.BYE))
    seen = _observation(spec.rank, hook, steps, control.memory_record)
    uses = [payload.uses(), real.uses()]
    return replace(seen, payloads=all_uses(uses), moved=real.moved())


def _observation(
    rank: int,
    hook: LiveHookBase,
    steps: Sequence[StepEnd],
    memory: MemoryRecord | None,
) -> Observation:
    each = list(pairwise([StepEnd(0, 0, 0), *steps]))
    return Observation(
        rank=rank,
        step_end_ns=tuple(step.end_ns for step in steps),
        step_wait_ns=tuple(step.waited_ns - before.waited_ns for before, step in each),
        step_lag_ns=tuple(step.lag_ns - before.lag_ns for before, step in each),
        boot_s=hook.boot_s,
        communications=hook.communications,
        uncovered=hook.cursor.uncovered,
        peak_bytes=memory.peak_bytes if memory else 0,
        step_peak_bytes=memory.step_peak_bytes if memory else (),
        reserved_bytes=memory.reserved_bytes if memory else None,
    )


def _clock(spec: LiveSpec, origin_ns: int, emulation: NullEmulation | None) -> Clock:
    if emulation is not None:
        return NullClock(emulation.library)
    return VirtualClock(origin_ns) if spec.clock == "virtual" else PacedClock(origin_ns)


def _memory_tracker(spec: LiveSpec, emulation: NullEmulation | None) -> MemoryTracker:
    if emulation is not None:
        return emulation.memory
    # Without resets after each step: the program's own log shows its device's peaks.
    return CudaMemoryTracker(per_step=False) if spec.device == "cuda" else CpuMemoryTracker()


def _begin(spec: LiveSpec) -> tuple[Wire, Begun]:
    """Wait until the job begins; return the connection to the coordinator."""
    if spec.begun is not None:
        return Wire(socket.socket(fileno=spec.begun.connection)), spec.begun
    wire = _connect(spec)
    origin_ns, others = _wait_for_go(wire)
    # A program that replaces itself (os.exec) keeps the connection.
    os.set_inheritable(wire.fileno(), True)
    begun = Begun(connection=wire.fileno(), origin_ns=origin_ns, others=tuple(others))
    return wire, begun


def _connect(spec: LiveSpec) -> Wire:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + 60
    while True:
        try:
            connection.connect(spec.socket)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise StuckError("the coordinator does not listen; its log says why") from None
            time.sleep(0.005)
    wire = Wire(connection)
    wire.send(Message(MessageKind.HELLO, spec.rank))
    return wire


def _wait_for_go(wire: Wire) -> tuple[int, list[int]]:
    """Wait; return when the job begins, and the ids of the emulation's other processes."""
    while True:
        messages = wire.receive(None)
        if messages is None:
            raise StuckError("the coordinator ended before the job began; its log says why")
        for message in messages:
            if message.kind == MessageKind.GO:
                text = message.text or {}
                coordinator = [wire.process] if wire.process else []
                return message.time_ns, coordinator + list(text.get("processes", ()))


def main(arguments: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    die_with_parent()
    faulthandler.enable()  # a crash in native code leaves the Python frames in the rank's log
    path = Path(arguments[0])
    spec = LiveSpec.load(path)
    try:
        if spec.live_on:
            claim_device(spec.device, spec.live_on[spec.live.index(spec.rank)])
        save_json(run_live(spec, path), spec.result_path)
    except BaseException as error:
        # No echo: the rank's output is shown as it comes, and the parent shows the traceback.
        return save_failure(spec.error_path, spec.rank, error, echo=False)
    # Daemon threads of the program (data loaders, profilers) must not hold up the end.
    end_now(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
