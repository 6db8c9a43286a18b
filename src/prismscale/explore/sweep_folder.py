"""The folder of a sweep, with its points and its tables.

::

    points/NAME/        run folder of each point, as ``prismscale run --out`` leaves it
    points/NAME.json    outcome of the point: reused while the point stays the same
    logs/               output of every process
    explore.json  explore.csv  report.html
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prismscale.errors import FormatError, StorageError
from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.tasks import PointTask
from prismscale.files import remove_parts
from prismscale.runfolder import RunFolder, owned

MARKER = ".prismscale-explore"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFolder:
    """Paths inside the folder of one sweep."""

    root: Path

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, or open that of an earlier sweep, and lock it while the block runs.

        Raises:
            UsageError: the folder does not belong to a sweep, or another sweep uses it.
            StorageError: the folder cannot be created.
        """
        with owned(self.root, marker=MARKER, whose="a sweep"):
            try:
                self.points.mkdir(exist_ok=True)
                self.logs.mkdir(exist_ok=True)
            except OSError as error:
                raise StorageError(f"{self.root} cannot be used: {error.strerror}") from error
            try:
                yield
            finally:
                with suppress(OSError):
                    remove_parts(self.root)

    def earlier(self, task: PointTask) -> Outcome | None:
        """Return the outcome of a point in an earlier sweep; None if it is no longer valid."""
        try:
            found = Outcome.load(task.outcome_path)
        except FormatError:
            return None
        if found.key != task.key or not found.is_final:
            return None
        is_there = RunFolder(root=task.folder).results.is_file()
        return found if found.status is not Status.DONE or is_there else None

    def forget(self, task: PointTask) -> None:
        """Remove the outcome and the run folder that an earlier sweep left of a point."""
        try:
            task.outcome_path.unlink(missing_ok=True)
            if task.folder.is_dir():
                shutil.rmtree(task.folder)
        except OSError as error:
            raise StorageError(f"{task.folder} cannot be removed: {error.strerror}") from error

    @property
    def points(self) -> Path:
        """Folder of run folders and outcomes."""
        return self.root / "points"

    @property
    def logs(self) -> Path:
        """Folder for the output of processes."""
        return self.root / "logs"

    @property
    def table(self) -> Path:
        """CSV file with the figures, for spreadsheets."""
        return self.root / "explore.csv"

    @property
    def results(self) -> Path:
        """JSON file with the figures, for programs."""
        return self.root / "explore.json"

    @property
    def report(self) -> Path:
        """HTML page with the figures, for people."""
        return self.root / "report.html"
