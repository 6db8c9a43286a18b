"""Points that are to be run, and the interface of their runners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from prismscale.errors import StorageError
from prismscale.explore.figures import Asked
from prismscale.explore.outcome import Outcome
from prismscale.explore.points import SweepPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class PointTask:
    """A point to run, and the paths of its files."""

    point: SweepPoint
    key: str
    """Key of its outcome; see :attr:`.Outcome.key`."""
    device: str
    preload: tuple[str, ...]
    """Modules that are already imported in its ranks."""
    folder: Path
    """Run folder; its name is that of the point."""

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.name

    @property
    def outcome_path(self) -> Path:
        """File of its outcome, next to the run folder."""
        return self.folder.with_name(f"{self.name}.json")


class Ran(NamedTuple):
    """A point that was run, with its outcome."""

    task: PointTask
    outcome: Outcome


class PointRunner(Protocol):
    """Runs points somewhere and leaves their run folders and outcome files on this machine."""

    def run(self, tasks: Sequence[PointTask], asked: Asked) -> Iterator[Ran]:
        """Run every point and yield each as it ends.

        Raises:
            StorageError: files can no longer be written.
        """
        ...


def raise_if_not_stored(outcome: Outcome) -> None:
    """Raise a point's storage error again: a full disk would end every other point, too."""
    if outcome.error == StorageError.__name__:
        raise StorageError(outcome.reason)
