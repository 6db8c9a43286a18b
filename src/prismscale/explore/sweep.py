"""One sweep: reuses outcomes of an earlier sweep and runs all other points."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from prismscale import __version__
from prismscale.errors import PrismscaleError, StorageError
from prismscale.explore.figures import Asked
from prismscale.explore.outcome import Outcome, failed
from prismscale.explore.points import SweepPoint
from prismscale.explore.ranking import Explored
from prismscale.explore.results import SCHEMA
from prismscale.explore.sweep_folder import SweepFolder
from prismscale.explore.tasks import PointRunner, PointTask
from prismscale.job_parts import preloaded
from prismscale.progress import StageUpdate
from prismscale.run_options import parse


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Points that can be run, and the outcomes of points that cannot."""

    tasks: tuple[PointTask, ...]
    impossible: dict[str, Outcome]
    """Outcome of each point whose options ``prismscale run`` refuses, by the point's digest."""


def prepare(points: Sequence[SweepPoint], folder: SweepFolder, asked: Asked) -> Prepared:
    """Read every point's command line as ``prismscale run`` does.

    Raises:
        PrismscaleError: every point is refused. It is the error of the first point.
    """
    tasks: list[PointTask] = []
    impossible: dict[str, Outcome] = {}
    first: PrismscaleError | None = None
    for point in points:
        try:
            tasks.append(_task(point, folder, asked))
        except PrismscaleError as error:
            impossible[point.digest] = failed("", error)
            first = first or error
    if first is not None and not tasks:
        raise first
    return Prepared(tasks=tuple(tasks), impossible=impossible)


def sweep(
    points: Sequence[SweepPoint],
    folder: SweepFolder,
    runner: PointRunner,
    asked: Asked,
    *,
    again: bool = False,
    retry: bool = False,
    progress: StageUpdate = lambda done, total: None,
) -> list[Explored]:
    """Run the points and return a row for each, in their order.

    Points whose outcome an earlier sweep left in the folder are not run again.

    Args:
        points: the points of the sweep.
        folder: the sweep's folder, already opened; takes run folders and outcomes.
        runner: runs the points.
        asked: options of the figures of each point.
        again: run all points again, with new captures.
        retry: run failed points again.
        progress: called with the number of finished rows and of all rows.

    Raises:
        PrismscaleError: no point can be run at all, or files cannot be written.
    """
    prepared = prepare(points, folder, asked)
    known = dict(prepared.impossible)
    left = []
    for task in prepared.tasks:
        if again:
            folder.forget(task)
        earlier = folder.earlier(task)
        if earlier is None or (retry and earlier.step_ns is None):
            left.append(task)
        else:
            known[task.point.digest] = earlier
    progress(len(known), len(points))
    try:
        for ran in runner.run(left, asked):
            known[ran.task.point.digest] = ran.outcome
            progress(len(known), len(points))
    except StorageError as error:
        raise StorageError(
            f"{error}\nThe sweep stopped with {len(known)} of {len(points)} points done; the same "
            "command goes on from there"
        ) from error
    return [Explored(point=point, outcome=known[point.digest]) for point in points]


def _task(point: SweepPoint, folder: SweepFolder, asked: Asked) -> PointTask:
    run_folder = folder.points / point.folder_name
    config = parse(["--out", str(run_folder), *point.arguments])
    cluster = config.load_cluster()
    parts = [
        __version__,
        SCHEMA,
        config.capture_key(cluster),
        repr(cluster),
        point.digest,
        sorted(config.slow.items()),
        repr(config.scenario(cluster, "").variability),
        [asked.draws, asked.seed, asked.tokens_per_step],
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return PointTask(
        point=point,
        key=key,
        device=config.device,
        preload=preloaded(config),
        folder=run_folder,
    )
