"""Points side by side on this machine.

Each point is a process that forks its ranks. It is itself a fork of a server that has imported the
modules that points and ranks need, and modules that ranks of earlier points imported. A server has
the environment of its forks, because modules read it while they are imported. A sweep over
environment variables therefore has one server for each environment.

On the null device all points share one place per core. A point that has a rank to capture takes a
free place, so no core waits for the slowest rank of a point. Where computation is measured, points
run one after another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from prismscale.errors import FormatError, StorageError, UsageError
from prismscale.explore.figures import Asked
from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.point_process import PointSpec
from prismscale.explore.tasks import PointTask, Ran, raise_if_not_stored
from prismscale.job_parts import LEARNED
from prismscale.processes.children import Child, Children, Program, ending
from prismscale.processes.fork_server import ForkServer
from prismscale.processes.starter import cores

POINT_PROCESS = "prismscale.explore.point_process"
_POLL_S = 0.05
_Needs: TypeAlias = tuple[tuple[tuple[str, str | None], ...], tuple[str, ...]]
"""Requirements on a point's server: changes of the environment, and modules to preload."""


@dataclass(frozen=True, kw_only=True)
class LocalPoints:
    """Runs points on this machine (a :class:`.PointRunner`)."""

    logs: Path
    """Folder for the output of processes."""
    workers: int = field(default_factory=cores)
    """Number of ranks that run side by side, over all points."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment to which the changes of each point are applied."""
    detached: bool = False
    """Somebody may kill this process's children before it: see :class:`.Reaper`."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; at least 1 is needed")

    def run(self, tasks: Sequence[PointTask], asked: Asked) -> Iterator[Ran]:
        """See :class:`.PointRunner`."""
        together = all(task.device == "null" for task in tasks)
        # One point more than there are places: while a point assembles its graph, it needs none.
        most = self.workers + 1 if together else 1
        waiting = _by_server(tasks)
        running: dict[str, PointTask] = {}
        # Points end before the servers: a server that ends would end the points forked from it.
        with _Servers(self) as servers, Children(detached=self.detached) as children:
            places = str(children.shared_folder()) if together else ""
            while waiting or running:
                while waiting and len(running) < most:
                    task = waiting.pop(0)
                    running[task.name] = task
                    self._start(children, servers.of(task), task, asked, places)
                for child in children.finished():
                    task = running.pop(child.name)
                    outcome = _outcome_of(task, child)
                    raise_if_not_stored(outcome)
                    yield Ran(task, outcome)
                servers.keep([*running.values(), *waiting[:1]])
                time.sleep(_POLL_S)

    def _start(
        self, children: Children, server: ForkServer, task: PointTask, asked: Asked, places: str
    ) -> None:
        log = self.logs / f"{task.name}.log"
        spec = PointSpec(
            key=task.key,
            arguments=task.point.arguments,
            folder=str(task.folder),
            outcome=str(task.outcome_path),
            log=str(self.logs / f"{task.name}-ranks.log"),
            places=places,
            n_places=self.workers,
            asked=asked,
        )
        path = self.logs / f"{task.name}.json"
        spec.save(path)
        task.outcome_path.unlink(missing_ok=True)
        server.start(
            children,
            Program(name=task.name, module=POINT_PROCESS, arguments=(str(path),), log=log),
        )


class _Servers:
    """One fork server for each :data:`_Needs` in use (a context)."""

    def __init__(self, runner: LocalPoints) -> None:
        self._runner = runner
        self._known: dict[_Needs, ForkServer] = {}
        self._started = 0

    def __enter__(self) -> _Servers:
        return self

    def __exit__(self, *ended: object) -> None:
        self.keep([])

    def of(self, task: PointTask) -> ForkServer:
        """Return the server of a point."""
        key = _needs(task)
        if key not in self._known:
            self._started += 1
            self._known[key] = ForkServer(
                preload=(POINT_PROCESS, *task.preload),
                learn=LEARNED,
                log=self._runner.logs / f"fork-server-{self._started}.log",
                environment=changed(self._runner.environment, task.point.environment),
            )
        return self._known[key]

    def keep(self, tasks: Sequence[PointTask]) -> None:
        """End all servers except those that these points need."""
        needed = {_needs(task) for task in tasks}
        for key in self._known.keys() - needed:
            self._known.pop(key).close()


def changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with changes applied; None as a value removes the variable."""
    found = {**environment, **changes}
    return {name: value for name, value in found.items() if value is not None}


def _needs(task: PointTask) -> _Needs:
    return tuple(sorted(task.point.environment.items())), task.preload


def _by_server(tasks: Sequence[PointTask]) -> list[PointTask]:
    """Order points so that those of one server follow each other."""
    order = {needs: i for i, needs in enumerate(dict.fromkeys(map(_needs, tasks)))}
    return sorted(tasks, key=lambda task: order[_needs(task)])


def _outcome_of(task: PointTask, child: Child) -> Outcome:
    code = child.process.wait()
    if code == StorageError.exit_code:
        raise StorageError(child.log_tail(1))
    try:
        return Outcome.load(task.outcome_path)
    except FormatError:
        tail = child.log_tail(1)
        return Outcome(
            key=task.key,
            status=Status.BROKEN,
            reason=f"its process {ending(code)}{': ' if tail else ''}{tail}",
        )
