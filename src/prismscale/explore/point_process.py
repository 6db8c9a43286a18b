"""The process of one point: does what ``prismscale run`` does, then computes the figures.

``python -m prismscale.explore.point_process SPEC``. It is a fork of a server that has already
imported the modules for both. However the point ends, the process writes its
:class:`~prismscale.explore.outcome.Outcome`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from prismscale.api import perform
from prismscale.errors import PrismscaleError, StorageError
from prismscale.explore.figures import Asked, figures
from prismscale.explore.outcome import Outcome, failed
from prismscale.job_parts import LEARNED
from prismscale.processes.children import die_with_parent
from prismscale.processes.fork_server import ForkServer
from prismscale.processes.forked_server import split
from prismscale.processes.shared_slots import SharedSlots, SharingStarter
from prismscale.processes.starter import Starter
from prismscale.run_options import parse
from prismscale.typed_files import load_json, save_json


@dataclass(frozen=True, kw_only=True, slots=True)
class PointSpec:
    """Instructions for the process of a point, passed as a JSON file."""

    WHAT = "a point"

    key: str
    arguments: tuple[str, ...]
    """Arguments of ``prismscale run``, without ``--out``."""
    folder: str
    """Run folder."""
    outcome: str
    """File for the outcome."""
    log: str
    """Log file of the fork server that starts its ranks."""
    places: str = ""
    """Folder of the places that ranks of all points share; empty: ranks have all cores."""
    n_places: int = 1
    asked: Asked = field(default_factory=Asked)

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises :class:`FormatError`."""
        return load_json(cls, path, cls.WHAT)


class Ended(BaseException):
    """Raised on SIGTERM: it unwinds the stack, so that every rank ends with this process."""


def run_point(spec: PointSpec, server: ForkServer) -> Outcome:
    """Run a point with ranks that are forks of ``server``; return its figures or its failure."""
    try:
        config = parse(["--out", spec.folder, *spec.arguments])
        with server, _sharing(server, spec) as starter:
            perform(config, starter=starter)
        return figures(Path(spec.folder), spec.key, spec.asked)
    except PrismscaleError as error:
        traceback.print_exception(error)
        return failed(spec.key, error)


@contextlib.contextmanager
def _sharing(server: ForkServer, spec: PointSpec) -> Iterator[Starter]:
    if not spec.places:
        yield server
        return
    shared = SharedSlots(folder=Path(spec.places), count=spec.n_places)
    with contextlib.closing(SharingStarter(inner=server, shared=shared)) as starter:
        yield starter


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Ended


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code, also in the ranks' processes (see :func:`.split`)."""
    die_with_parent()
    spec = PointSpec.load(Path(arguments[0]))
    server = split(Path(spec.log), learn=LEARNED)
    if isinstance(server, int):
        return server
    signal.signal(signal.SIGTERM, _end)
    try:
        run_point(spec, server).save(Path(spec.outcome))
    except StorageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Ended:
        return 128 + signal.SIGTERM
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
