"""Runs all ranks of a job with real values, a few at a time, and collects their traces."""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prismscale.analysis.switched import SwitchCounts
from prismscale.graph.io import load_trace
from prismscale.graph.trace import RankTrace
from prismscale.payload.recordings.recorded_job import recorded_by_selection
from prismscale.payload.recordings.selection import refuse_idle_selections
from prismscale.processes.children import Children, Program
from prismscale.processes.failure import failure_of
from prismscale.processes.starter import Starter
from prismscale.progress import NotedUpdate
from prismscale.switching.coordinator import SwitchingCoordinator
from prismscale.switching.memory_budget import MemoryBudget
from prismscale.switching.spilled_memory import build_allocator, resident_bytes
from prismscale.switching.switched_spec import SwitchedSpec
from prismscale.typed_files import save_json

DONE = "switched.json"
"""File with :class:`SwitchCounts`. It exists once all ranks have run to the end."""
_POLL_S = 0.05
_STUCK_AFTER_S = 10.0


@dataclass(kw_only=True)
class Connection:
    """Connection of one thread of a rank."""

    end: socket.socket
    rank: int | None = None
    text: bytes = b""

    def lines(self) -> Iterator[dict[str, Any]] | None:
        """Return the questions that have arrived; None once the other end is closed."""
        try:
            received = self.end.recv(1 << 16)
        except ConnectionResetError:
            return None
        if not received:
            return None
        *lines, self.text = (self.text + received).split(b"\n")
        return map(json.loads, lines)

    def answer(self, told: dict[str, Any]) -> None:
        """Send an answer. A rank that has ended meanwhile is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.end.sendall(json.dumps(told).encode() + b"\n")


@dataclass(kw_only=True)
class SwitchingStage:
    """The stage that runs all ranks of one job with real values."""

    spec: SwitchedSpec
    """Spec of any rank. Its ``rank``, ``address`` and ``values`` are replaced."""
    slots: int
    logs: Path
    starter: Starter
    budget_bytes: int = 0
    """Memory of this process and all ranks together; 0: unlimited."""
    progress: NotedUpdate | None = None

    def run(self) -> list[RankTrace]:
        """Return the traces of all ranks, in rank order.

        If an earlier run has ended, its traces are read instead.

        Raises:
            ScriptError: the program failed on a rank.
            StuckError: the program's ranks wait for each other.
            MismatchError: ranks disagree about a communication.
        """
        folder, world_size = Path(self.spec.out), self.spec.world_size
        if not (folder / DONE).exists():
            with Children() as children:
                self._run(children)
        return [load_trace(replace(self.spec, rank=rank).trace_path) for rank in range(world_size)]

    def _run(self, children: Children) -> None:
        folder = Path(self.spec.out)
        values = folder / "values"
        for left in (values, self.spec.recordings):
            shutil.rmtree(left, ignore_errors=True)
        children.adopt_folder(values.absolute())
        values.mkdir(parents=True)
        address = str(children.shared_folder() / "coordinator")
        spec = replace(self.spec, address=address, values=str(values))
        if self.budget_bytes:
            build_allocator()
            spec = replace(spec, spilled_bytes=shutil.disk_usage(values).free)
        coordinator = SwitchingCoordinator(
            world_size=spec.world_size,
            n_slots=self.slots,
            start=lambda rank: self._start(children, replace(spec, rank=rank)),
            budget=self._budget(),
            patience_s=_STUCK_AFTER_S,
        )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(spec.world_size)
            self._serve(children, coordinator, listener)
        if spec.record:
            refuse_idle_selections(spec.record, recorded_by_selection(spec.recordings))
        counts = SwitchCounts(
            slots=self.slots,
            switches=coordinator.slots.switches,
            budget_bytes=self.budget_bytes,
            presses=coordinator.budget.presses if coordinator.budget else 0,
        )
        save_json(counts, folder / DONE)

    def _budget(self) -> MemoryBudget | None:
        if not self.budget_bytes:
            return None
        return MemoryBudget(self.budget_bytes, besides_bytes=resident_bytes())

    def _serve(
        self, children: Children, coordinator: SwitchingCoordinator, listener: socket.socket
    ) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_ends:
            selector.register(listener, selectors.EVENT_READ)
            coordinator.advance()
            looked = time.monotonic()
            while coordinator.running():
                for key, _ in selector.select(_POLL_S):
                    if key.data is None:
                        end, _ = listener.accept()
                        connection = Connection(end=open_ends.enter_context(end))
                        selector.register(end, selectors.EVENT_READ, connection)
                    elif not self._hear(coordinator, key.data):
                        selector.unregister(key.data.end)
                        key.data.end.close()
                # Looking at the processes of all ranks takes longer than answering one rank.
                if time.monotonic() - looked > _POLL_S:
                    self._collect(children, coordinator)
                    looked = time.monotonic()
                coordinator.advance()

    @staticmethod
    def _hear(coordinator: SwitchingCoordinator, connection: Connection) -> bool:
        """Answer a rank's questions. Returns False once its connection is closed."""
        questions = connection.lines()
        if questions is None:
            return False
        for question in questions:
            if connection.rank is None:
                connection.rank = int(question["rank"])
            else:
                coordinator.asked(connection.rank, question, connection.answer)
        return True

    def _start(self, children: Children, spec: SwitchedSpec) -> None:
        spec.save(spec.path)
        for left in (spec.error_path, spec.stopped_path, spec.trace_path):
            left.unlink(missing_ok=True)
        program = Program(
            name=str(spec.rank),
            module=SwitchedSpec.PROCESS,
            arguments=(str(spec.path),),
            log=self.logs / f"switched-rank-{spec.rank}.log",
            slot=spec.rank % self.slots,
        )
        self.starter.start(children, program)

    def _collect(self, children: Children, coordinator: SwitchingCoordinator) -> None:
        for child in children.finished():
            spec = replace(self.spec, rank=int(child.name))
            spec.path.unlink(missing_ok=True)
            if child.process.returncode != 0 or not spec.trace_path.exists():
                raise failure_of(child, spec.rank, spec.error_path, "the run with real values")
            coordinator.ended(spec.rank, stopped=spec.stopped_path.exists())
        if self.progress is not None:
            done, note = coordinator.progress()
            self.progress(done, self.spec.world_size * self.spec.marks, note)
