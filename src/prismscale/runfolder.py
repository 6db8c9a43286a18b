"""The folder of one run: where everything lies, and who may use it.

::

    captures/KEY/rank-0.parquet …   traces, reused while KEY (program, world, device) stays the same
    graph/                          the job's execution graph
    periodic/                       the graphs of what happens only now and then
    scenario.json                   the cluster, speed and faults that it is timed with
    timeline.parquet                step ends of every rank, nodes of the shown ones
    live/KEY/                       observations of live ranks, reused in the same way
    flight/                         of a job that stands still: what each rank called last
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
        """Create the folder, or take that of an earlier run. Nobody else may use it while the block
        runs. When it ends, files that killed processes left incomplete are removed.

        Raises:
            UsageError: a folder that is not a run's, or that another run uses.
            StorageError: it cannot be created.
        """
        with owned(self.root, marker=MARKER, whose="a run") as root:
            with _writing(root):
                if fresh:
                    self._clear()
                self._prepare()
            try:
                yield self
            finally:
                # How the run ended matters more; the next one tries again.
                with suppress(OSError):
                    remove_parts(root)

    def captures(self, key: str) -> Path:
        """Traces of one program, created if need be."""
        folder = self.root / "captures" / key
        with _writing(folder):
            (folder / "payloads").mkdir(parents=True, exist_ok=True)
        return folder

    def observations(self, key: str) -> Path:
        """Observations of one live run, created if need be; those of others are removed."""
        folder = self.live / key
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for other in self.live.iterdir():
                if other != folder:
                    shutil.rmtree(other)
        return folder

    @property
    def graph(self) -> Path:
        """The execution graph."""
        return self.root / "graph"

    @property
    def periodic(self) -> Path:
        """What happens only now and then."""
        return self.root / "periodic"

    @property
    def scenario(self) -> Path:
        """What the graph is timed with."""
        return self.root / "scenario.json"

    @property
    def live(self) -> Path:
        """Observations of live ranks."""
        return self.root / "live"

    @property
    def flight(self) -> Path:
        """Flight records of a job that stands still."""
        return self.root / "flight"

    @property
    def logs(self) -> Path:
        """Output of processes."""
        return self.root / "logs"

    @property
    def timeline(self) -> Path:
        """Simulated times."""
        return self.root / "timeline.parquet"

    @property
    def results(self) -> Path:
        """Figures for machines."""
        return self.root / "results.json"

    @property
    def report(self) -> Path:
        """Figures for people."""
        return self.root / "report.html"

    @property
    def trace(self) -> Path:
        """Timeline for ui.perfetto.dev."""
        return self.root / "trace.perfetto-trace"

    def _clear(self) -> None:
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()

    def _prepare(self) -> None:
        """Results of an earlier run must not be taken for this one's, nor halves for wholes."""
        for path in (self.results, self.report, self.trace, self.timeline, self.scenario):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.flight, ignore_errors=True)
        remove_parts(self.root)
        self.logs.mkdir(parents=True, exist_ok=True)


@contextmanager
def owned(root: Path, *, marker: str, whose: str) -> Iterator[Path]:
    """Create a folder, or take one that was created so before. Nobody else may use it while the
    block runs.

    Args:
        root: the folder.
        marker: file in it by which it is known again.
        whose: what makes such folders: ``a run``.

    Raises:
        UsageError: a folder of something else, or one that is in use.
        StorageError: it cannot be created.
    """
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        path = root / marker
        if not path.exists() and any(root.iterdir()):
            raise UsageError(f"{root} holds files that are not {whose}'s; choose an empty --out")
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            # The lock goes with the descriptor, however this process ends.
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
