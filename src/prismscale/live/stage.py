"""Runs the live stage: one coordinator, one process for each live rank, all ended together."""

from __future__ import annotations

import os
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prismscale.analysis.observation import Observation
from prismscale.durations.faults import Faults
from prismscale.errors import PrismscaleError, StuckError
from prismscale.graph.io import save_graph, save_trace
from prismscale.graph.job_graph import JobGraph
from prismscale.live.coordinator.coordinator_spec import CoordinatorSpec
from prismscale.live.live_spec import (
    ASSISTANT_PROCESS,
    COORDINATOR_PROCESS,
    LiveSpec,
    LogLine,
)
from prismscale.live.real_part import ADDRESS
from prismscale.processes.children import Child, Children, Program
from prismscale.processes.failure import failure_of
from prismscale.processes.starter import Spawner, Starter
from prismscale.transfers.assistants import AssistantSpec
from prismscale.transfers.transfer_settings import OTHERS
from prismscale.typed_files import load_json, save_json

POLL_S = 0.05
COORDINATOR = "coordinator"
ASSISTANTS = "assistants"


@dataclass(frozen=True, kw_only=True)
class LiveStage:
    """Runs the live ranks of a job, with the processes that they need."""

    spec: LiveSpec
    """Specification of the job. Rank, trace and socket are filled in for each live rank."""
    folder: Path
    logs: Path
    cluster: str
    slow: Mapping[int, float]
    hang: Mapping[int, int]
    compute_scale: float = 1.0
    attach: int | None = None
    """The live rank that has this process's terminal, for a debugger."""
    starter: Starter = field(default_factory=Spawner)

    def observe(
        self,
        graph: Callable[[], JobGraph],
        on_line: LogLine,
        on_step: Callable[[int], None],
    ) -> list[Observation]:
        """Observations of all live ranks, in the order of ``spec.live``.

        Those of an earlier run are used where there are any. A hang that was asked for leaves none.

        Raises:
            ScriptError: the program failed on a live rank.
            StuckError: the job hangs, and nobody asked for it.
        """
        # A user who asks for a terminal wants to see the program run.
        seen = self.observed() if self.attach is None else []
        if seen:
            return seen
        try:
            return self.run(graph(), on_line, on_step)
        except StuckError:
            # The simulation says who waits for whom in a hang that was asked for.
            if not self.hang:
                raise
            return []

    def run(
        self, graph: JobGraph, on_line: LogLine, on_step: Callable[[int], None]
    ) -> list[Observation]:
        """Run all live ranks to the end; return their observations (``live-<r>.json``), in order.

        Raises:
            ScriptError: the program failed on a live rank.
            StuckError: the job hangs.
        """
        followers: list[threading.Thread] = []
        try:
            with _terminal_kept(), Children() as children:
                followers = self._start(children, graph, children.shared_folder(), on_line)
                self._watch(children, on_step)
        finally:
            # All children have ended, so followers come to the end of their logs.
            for follower in followers:
                follower.join()
        return self.observed()

    def observed(self) -> list[Observation]:
        """Observations that :meth:`run` left, in order; empty unless all live ranks have theirs."""
        paths = [self.folder / f"live-{rank}.json" for rank in self.spec.live]
        if not all(path.exists() for path in paths):
            return []
        return [load_json(Observation, path, "what was seen of a live rank") for path in paths]

    def _for(self, rank: int, exchange: Path) -> LiveSpec:
        return replace(
            self.spec,
            rank=rank,
            attached=rank == self.attach,
            compute_factor=self.compute_scale * self.slow.get(rank, 1.0),
            hang_step=self.hang.get(rank),
            exchange=str(exchange),
            socket=str(exchange / "coordinator"),
            trace=str(self.folder / f"trace-{rank}.parquet"),
        )

    def _start(
        self, children: Children, graph: JobGraph, exchange: Path, on_line: LogLine
    ) -> list[threading.Thread]:
        """Start all processes; return the threads that pass on what live ranks print."""
        save_graph(graph, self.folder / "graph")
        coordinator = self.folder / "coordinator.json"
        told = CoordinatorSpec(
            graph=str(self.folder / "graph"),
            cluster=self.cluster,
            live=self.spec.live,
            faults=Faults(slow=self.slow, hang=self.hang),
            compute_scale=self.compute_scale,
            what_ifs=self.spec.what_ifs,
            follow_speed=self.spec.communication_load,
            socket=str(exchange / "coordinator"),
        )
        save_json(told, coordinator)
        replay = Program(
            name=COORDINATOR,
            module=COORDINATOR_PROCESS,
            arguments=(str(coordinator),),
            log=self.logs / "coordinator.log",
        )
        self.starter.start(children, replay)
        if self.spec.transfers.are_real:
            self._start_assistants(children, exchange)
        followers = []
        for slot, rank in enumerate(self.spec.live):
            spec = self._for(rank, exchange)
            rank_class = graph.classes[int(graph.class_of_R[rank])]
            save_trace(rank_class.trace, Path(spec.trace))
            path = self.folder / f"live-{rank}.spec.json"
            spec.save(path)
            # The folder may be of an earlier run of the same command, which failed.
            spec.error_path.unlink(missing_ok=True)
            program = Program(
                name=str(rank),
                module=LiveSpec.PROCESS,
                arguments=(str(path),),
                log=self.logs / f"live-rank-{rank}.log",
                slot=slot,
            )
            # Only a process that is started anew can have the terminal.
            starter = Spawner(attached=True) if spec.attached else self.starter
            followers.append(_follow(starter.start(children, program), rank, on_line))
        return followers

    def _start_assistants(self, children: Children, exchange: Path) -> None:
        path = self.folder / "assistants.json"
        self._assistants_error.unlink(missing_ok=True)
        told = AssistantSpec(
            live=self.spec.live,
            folder=str(exchange),
            address=str(exchange / ADDRESS),
            recordings=self.spec.recordings,
            error=str(self._assistants_error),
            seen=str(self.folder / "assistants.seen.json"),
            namespace=self.spec.transfers.namespaces.get(OTHERS, ""),
        )
        save_json(told, path)
        program = Program(
            name=ASSISTANTS,
            module=ASSISTANT_PROCESS,
            arguments=(str(path),),
            log=self.logs / "assistants.log",
        )
        self.starter.start(children, program)

    @property
    def _assistants_error(self) -> Path:
        return self.folder / "assistants.error.json"

    def _watch(self, children: Children, on_step: Callable[[int], None]) -> None:
        left = {str(rank) for rank in self.spec.live}
        total = len(left)
        if self.spec.transfers.are_real:
            # Wait for the assistants too: at their end they report the memory that they took.
            left.add(ASSISTANTS)
        while left:
            time.sleep(POLL_S)
            failures = []
            for child in children.finished():
                if child.process.returncode != 0:
                    failures.append(self._failure(child))
                elif child.name != COORDINATOR:
                    left.discard(child.name)
                    on_step(total - len(left - {ASSISTANTS}))
            # If one live rank fails, the others may be stuck by now: its own error comes first.
            for failure in sorted(failures, key=lambda f: isinstance(f, StuckError)):
                raise failure

    def _failure(self, child: Child) -> PrismscaleError:
        if child.name == COORDINATOR:
            return PrismscaleError(f"the coordinator failed:\n{child.log_tail(30)}")
        if child.name == ASSISTANTS:
            return failure_of(child, -1, self._assistants_error, "the live run")
        rank = int(child.name)
        path = self.folder / f"live-{rank}.error.json"
        failure = failure_of(child, rank, path, "the live run")
        if isinstance(failure, StuckError):
            return StuckError(f"live rank {rank} waits for ever: {failure}")
        return failure


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Restore the terminal: a debugger that ends while it reads a line leaves it without echo."""
    # A process without a standard input has no file there.
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        if not _is_in_background():
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_in_background() -> bool:
    """Whether the terminal would stop this process for changing it."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()
    except OSError:  # it controls no process of this session
        return False


def _follow(child: Child, rank: int, on_line: LogLine) -> threading.Thread:
    """Pass a child's log on line by line until it has ended."""

    def read() -> None:
        begun = b""
        with child.log.open("rb") as log:
            while True:
                # Asked before reading, so that the last output is still read.
                ended = child.process.returncode is not None
                *lines, begun = (begun + log.read()).split(b"\n")
                if ended and begun:
                    lines.append(begun)
                for line in lines:
                    on_line(rank, line.decode(errors="replace"))
                if ended:
                    return
                time.sleep(POLL_S)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
