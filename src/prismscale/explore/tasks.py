"""Points that are to be run, and what runs them."""

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
    """A point, and where its files go."""

    point: SweepPoint
    key: str
    """Of its outcome."""
    device: str
    preload: tuple[str, ...]
    """Modules that its ranks find imported."""
    folder: Path
    """Run folder, in a folder of its own name."""

    @property
    def name(self) -> str:
        """Of the run folder."""
        return self.folder.name

    @property
    def outcome_path(self) -> Path:
        """Where its outcome is kept."""
        return self.folder.with_name(f"{self.name}.json")


class Ran(NamedTuple):
    """A point that was run."""

    task: PointTask
    outcome: Outcome


class PointRunner(Protocol):
    """Runs points somewhere; their run folders are here afterwards, and their outcomes written."""

    def run(self, tasks: Sequence[PointTask], asked: Asked) -> Iterator[Ran]:
        """Run every point, and tell of each as it ends.

        Raises:
            StorageError: files cannot be written any more.
        """
        ...


def raise_if_not_stored(outcome: Outcome) -> None:
    """Raise what ended a point if it would end every other one too: a disk that is full."""
    if outcome.error == StorageError.__name__:
        raise StorageError(outcome.reason)
