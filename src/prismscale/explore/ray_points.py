"""Points on a Ray cluster: each runs on one node, and its run folder comes back.

A node that is lost takes its points with it, and Ray runs them again elsewhere. What is given back
is written here before it counts, so a sweep that is ended goes on like a local one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from prismscale.errors import FormatError, PrismscaleError, StorageError, UsageError
from prismscale.explore.figures import Asked
from prismscale.explore.local_points import LocalPoints
from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.tasks import PointTask, Ran, raise_if_not_stored
from prismscale.files import part_of
from prismscale.processes.ray_cluster import SCRATCH, connected_ray, first_done

PASSED_ON = (
    *("CUBLAS_", "CUDA_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTHON", "PYTORCH_", "TORCH"),
    "TRITON_",
)
"""How variables begin that a point finds on every node as they are here: those that programs and
their libraries read. Others may be secrets."""
SET_BY_RAY = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""How variables begin that Ray sets in its workers; programs must not find them."""
_RETRIES = 5
"""Lost nodes that one point survives."""


class OnNode(NamedTuple):
    """What every point needs to know, on whatever node."""

    working: str
    """Folder in which the command was given; every node has it."""
    environment: Mapping[str, str]
    n_places: int
    """Ranks of one point side by side."""


class Returned(NamedTuple):
    """What a node sends back."""

    outcome: Outcome
    files: Mapping[str, bytes]
    """Of the run folder, by path in it."""


@dataclass(frozen=True, kw_only=True)
class RayPoints:
    """Runs points on a cluster (a :class:`.PointRunner`)."""

    address: str | None = None
    """Of a running cluster, or ``auto``; None starts one on this machine."""
    workers: int | None = None
    """Ranks of one point side by side; None: as many as there are cores for each."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; at least 1 is needed")

    def run(self, tasks: Sequence[PointTask], asked: Asked) -> Iterator[Ran]:
        """See :class:`.PointRunner`.

        Raises:
            UsageError: there is no such cluster, or its nodes lack what a point needs.
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
            # No more at a time than run, and one ahead for each: results wait in Ray's memory.
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
    """The variables that every node gets."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


def _portable(task: PointTask) -> PointTask:
    # A node has no use for where its files lie here.
    return replace(task, folder=Path(task.folder.name))


def run_on_node(shared: OnNode, task: PointTask, asked: Asked) -> Returned:
    """Run one point in a folder of its own; called by Ray on a node.

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
    scratches = tempfile.TemporaryDirectory(prefix="prismscale-point-", dir=scratch_of_cluster)
    with scratches as scratch, chdir(shared.working):
        here = replace(task, folder=Path(scratch) / "points" / task.name)
        here.folder.parent.mkdir()
        runner = LocalPoints(
            logs=Path(scratch) / "logs",
            workers=shared.n_places,
            environment={**own, **shared.environment},
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
    """Put a run folder in its place, whole or not at all."""
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
