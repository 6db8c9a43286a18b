"""Points on a Ray cluster: each runs on one node, and its run folder comes back.

Points of a lost node are lost with it, and Ray runs them again elsewhere. A returned point counts
once its files are written on this machine, so an interrupted sweep continues like a local one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from prismscale.emulation.surroundings import FRAMEWORK_VARIABLES
from prismscale.errors import FormatError, PrismscaleError, StorageError, UsageError
from prismscale.explore.figures import Asked
from prismscale.explore.local_points import LocalPoints
from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.tasks import PointTask, Ran, raise_if_not_stored
from prismscale.files import part_of
from prismscale.processes.ray_cluster import SCRATCH, connected_ray, first_done
from prismscale.processes.reaper import guarded_folder

SET_BY_RAY = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Prefixes of the variables that Ray sets in its workers. Programs must not see them."""
_RETRIES = 5
"""How many lost nodes one point survives."""


class OnNode(NamedTuple):
    """Data that every point gets, on whatever node it runs."""

    working: str
    """Folder in which the command was given; every node must have it."""
    environment: Mapping[str, str]
    n_places: int
    """Number of ranks of one point that run side by side."""


class Returned(NamedTuple):
    """Result of a point as a node sends it back."""

    outcome: Outcome
    files: Mapping[str, bytes]
    """Files of the run folder, by their path in it."""


@dataclass(frozen=True, kw_only=True)
class RayPoints:
    """Runs points on a Ray cluster (a :class:`.PointRunner`)."""

    address: str | None = None
    """Address of a running cluster, or ``auto``; None starts a cluster on this machine."""
    workers: int | None = None
    """Number of ranks of one point that run side by side; None: the number of cores per point."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; at least 1 is needed")

    def run(self, tasks: Sequence[PointTask], asked: Asked) -> Iterator[Ran]:
        """See :class:`.PointRunner`.

        Raises:
            UsageError: there is no such cluster, or a node lacks the folder of the command.
        """
        if not tasks:
            return
        with connected_ray(self.address) as ray:
            cores = [int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]]
            n_places = self.workers or max(1, min(max(cores), sum(cores) // len(tasks)))
            shared = OnNode(
                working=os.getcwd(), environment=passed_on(os.environ), n_places=n_places
            )
            remote = ray.remote(run_on_node).options(
                num_cpus=n_places, max_retries=_RETRIES, scheduling_strategy="SPREAD"
            )
            # Submit those that run, and one ahead for each, because results use Ray's memory.
            most = 2 * max(1, sum(cores) // n_places)
            waiting = list(tasks)
            running: dict[Any, PointTask] = {}
            while waiting or running:
                while waiting and len(running) < most:
                    task = waiting.pop(0)
                    running[remote.remote(shared, _portable(task), asked)] = task
                done = first_done(ray, list(running))
                yield _received(ray, done, running.pop(done))


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that every node gets."""
    return {n: value for n, value in environment.items() if n.startswith(FRAMEWORK_VARIABLES)}


def _portable(task: PointTask) -> PointTask:
    # Only the name is kept: a node writes into a folder of its own.
    return replace(task, folder=Path(task.folder.name))


def run_on_node(shared: OnNode, task: PointTask, asked: Asked) -> Returned:
    """Run one point in a temporary folder; Ray calls this on a node.

    Raises:
        UsageError: the node lacks the folder in which the command was given.
    """
    if not Path(shared.working).is_dir():
        raise UsageError(
            f"node {os.uname().nodename} has no folder {shared.working}: the program and its "
            "files must be where they are here on every node of the cluster"
        )
    own = {k: v for k, v in os.environ.items() if not k.startswith(SET_BY_RAY)}
    scratch_of_cluster = own.pop(SCRATCH, None)
    # Guarded: Ray kills a worker whose command has ended.
    scratches = guarded_folder("prismscale-point-", scratch_of_cluster)
    with scratches as scratch, chdir(shared.working):
        here = replace(task, folder=scratch / "points" / task.name)
        here.folder.parent.mkdir()
        runner = LocalPoints(
            logs=scratch / "logs",
            workers=shared.n_places,
            environment={**own, **shared.environment},
            detached=True,
        )
        ((_, outcome),) = runner.run([here], asked)
        return Returned(outcome=outcome, files=_files(here.folder))


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _received(ray: Any, reference: Any, task: PointTask) -> Ran:
    try:
        found: Returned = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PrismscaleError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = f"lost with its node: {type(error).__name__}"
        outcome = Outcome(key=task.key, status=Status.BROKEN, reason=reason)
        return Ran(task, outcome)
    raise_if_not_stored(found.outcome)
    _write(found.files, task.folder)
    found.outcome.save(task.outcome_path)
    return Ran(task, found.outcome)


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write a run folder, either completely or not at all."""
    part = part_of(folder)
    try:
        for name, content in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise FormatError(f"a node sent a file for {name}, outside of its run folder")
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_bytes(content)
        part.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    except OSError as error:
        raise StorageError(f"{folder} was not written: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
