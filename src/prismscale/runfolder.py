"""The folder of one run: the paths of its files, and its lock.

::

    captures/KEY/rank-0.parquet …   traces, reused while KEY (program, world, device) stays the same
    graph/                          the job's execution graph
    periodic/                       the graphs of periodic events
    scenario.json                   the cluster, speed and faults that the graph is timed with
    timeline.parquet                step ends of every rank, nodes of the shown ranks
    live/KEY/                       observations of live ranks, reused in the same way
    flight/                         if the job stands still: the last calls of each rank
    logs/                           output of every process
    results.json  report.html  trace.perfetto-trace
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prismscale.errors import StorageError, UsageError
from prismscale.files import remove_parts

MARKER = ".prismscale"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    @contextmanager
    def opened(self, *, fresh: bool) -> Iterator[RunFolder]:
        """Create the folder, or open that of an earlier run, and lock it while the block runs.

        When the block ends, files that killed processes left incomplete are removed.

        Raises:
            UsageError: the folder is not a run's, or another run uses it.
            StorageError: the folder cannot be created.
        """
        with owned(self.root, marker=MARKER, whose="a run") as root:
            with _writing(root):
                if fresh:
                    self._clear()
                self._prepare()
            try:
                yield self
            finally:
                # An error here must not hide how the run ended; the next run tries again.
                with suppress(OSError):
                    remove_parts(root)

    def captures(self, key: str) -> Path:
        """Return the folder of one program's traces, created if need be."""
        folder = self.root / "captures" / key
        with _writing(folder):
            (folder / "payloads").mkdir(parents=True, exist_ok=True)
        return folder

    def observations(self, key: str) -> Path:
        """Return the folder of one live run's observations, and remove those of other live runs.

        The folder is created if need be.
        """
        folder = self.live / key
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for other in self.live.iterdir():
                if other != folder:
                    shutil.rmtree(other)
        return folder

    @property
    def graph(self) -> Path:
        """Folder of the execution graph."""
        return self.root / "graph"

    @property
    def periodic(self) -> Path:
        """Folder of the graphs of periodic events."""
        return self.root / "periodic"

    @property
    def scenario(self) -> Path:
        """File of the scenario that the graph is timed with."""
        return self.root / "scenario.json"

    @property
    def live(self) -> Path:
        """Folder of the observations of live ranks."""
        return self.root / "live"

    @property
    def flight(self) -> Path:
        """Folder of the flight records of a job that stands still."""
        return self.root / "flight"

    @property
    def logs(self) -> Path:
        """Folder of the output of all processes."""
        return self.root / "logs"

    @property
    def timeline(self) -> Path:
        """File of the simulated times."""
        return self.root / "timeline.parquet"

    @property
    def results(self) -> Path:
        """File of the results, for programs to read."""
        return self.root / "results.json"

    @property
    def report(self) -> Path:
        """File of the report, for people to read."""
        return self.root / "report.html"

    @property
    def trace(self) -> Path:
        """File of the timeline for ui.perfetto.dev."""
        return self.root / "trace.perfetto-trace"

    def _clear(self) -> None:
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()

    def _prepare(self) -> None:
        """Remove results of an earlier run and half-written files, and create the log folder.

        Otherwise they could be taken for results of this run, or for complete files.
        """
        for path in (self.results, self.report, self.trace, self.timeline, self.scenario):
            path.unlink(missing_ok=True)
        for made in (self.flight, self.graph, self.periodic):
            shutil.rmtree(made, ignore_errors=True)
        remove_parts(self.root)
        self.logs.mkdir(parents=True, exist_ok=True)


@contextmanager
def owned(root: Path, *, marker: str, whose: str) -> Iterator[Path]:
    """Create a folder, or open one that was created here before; lock it while the block runs.

    Args:
        root: the folder.
        marker: name of the file in it that identifies such folders and carries the lock.
        whose: what makes such folders, for messages: ``a run``.

    Raises:
        UsageError: the folder belongs to something else, or is in use.
        StorageError: the folder cannot be created.
    """
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        path = root / marker
        if not path.exists() and any(root.iterdir()):
            raise UsageError(f"{root} holds files that are not {whose}'s; choose an empty --out")
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            # The lock is released with the descriptor, however this process ends.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            another = whose.replace("a ", "another ", 1)
            raise UsageError(
                f"{root} is in use by {another}; wait for it or choose another --out"
            ) from None
        yield root
    finally:
        os.close(handle)


@contextmanager
def _writing(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{where} cannot be used: {error.strerror}") from error
