"""Damaged files one after the other, and what a reader may do with them."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from prismscale.errors import MOST_CHARACTERS, PrismscaleError
from support.foreign_reader import Reader, written

LONGEST_S = 10
MOST_BYTES = 1 << 30
"""That reading one file may take."""
OTHER_CHARACTERS = 1_000
"""Of a message, beside what of it comes from the file."""
_FAILURES_KEPT = 20


class Hanging(BaseException):
    """A reader that does not come back."""


@dataclass(kw_only=True)
class Outcomes:
    """What became of many damaged files."""

    cases: int = 0
    read: int = 0
    """Taken for good ones: what was damaged did not matter."""
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    """Of a kind once: the seed, and what happened."""
    n_failures: int = 0
    longest_s: float = 0.0
    highest_bytes: int = 0
    """Resident memory beyond that at the beginning."""

    def failed(self, seed: str, what: str) -> None:
        """Note something that must not be."""
        self.n_failures += 1
        kind = what.splitlines()[-1][:160]
        if len(self.failures) < _FAILURES_KEPT and not any(kind in f for f in self.failures):
            self.failures.append(f"{seed}: {what}")


def fuzz(reader: Reader, folder: Path, seed: int, *, cases: int, until: float) -> Outcomes:
    """Read up to ``cases`` damaged files until the monotonic time ``until``.

    Args:
        reader: what reads them.
        folder: an empty one.
        seed: of the random numbers: cases are the same for the same seed.
    """
    found, path = Outcomes(), written(reader, folder)
    good = reader.files[reader.path]
    before = _resident_bytes()
    with _limits(), _heard() as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader.read(path)
        for n in range(cases):
            if time.monotonic() > until:
                break
            rng = random.Random(f"{reader.name}/{seed}/{n}")
            path.write_bytes(rng.choice(reader.damages)(good, rng))
            name = f"{reader.name}, seed {seed}, case {n}"
            _one(reader, path, name, found)
            if aside := said():
                found.failed(name, f"said on the side: {aside[:300]}")
    found.highest_bytes = max(_resident_bytes() - before, 0)
    if found.highest_bytes > MOST_BYTES:
        found.failed(reader.name, f"took {found.highest_bytes >> 20:,} MiB")
    return found


def _one(reader: Reader, path: Path, seed: str, found: Outcomes) -> None:
    began = time.monotonic()
    found.cases += 1
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        shown = reader.read(path)
        found.read += 1
        if isinstance(shown, str):
            _printed(shown, "what is shown", seed, found)
    except PrismscaleError as error:
        found.refused += 1
        said = str(error)
        if len(said) > MOST_CHARACTERS + OTHER_CHARACTERS:
            found.failed(seed, f"a message of {len(said):,} characters")
        _printed(said, type(error).__name__, seed, found)
    except Hanging:
        found.failed(seed, f"did not end within {LONGEST_S} s")
    except (Exception, RecursionError) as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        found.failed(seed, f"{where}{type(error).__name__}: {str(error)[:200]}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    found.longest_s = max(found.longest_s, time.monotonic() - began)


def _printed(said: str, what: str, seed: str, found: Outcomes) -> None:
    """A terminal must show the text, and obey nothing in it."""
    if any(not (c.isprintable() or c in "\n\t") for c in said):
        found.failed(seed, f"{what} with control characters")
    try:
        said.encode()
    except UnicodeEncodeError:
        found.failed(seed, f"{what} that cannot be printed")


@contextmanager
def _heard() -> Iterator[Callable[[], str]]:
    """What is written to standard error since it was last asked, by C code too: an exception that
    nobody catches, such as one of a destructor, is told there."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:

        def said() -> str:
            sys.stderr.flush()
            if not os.fstat(file.fileno()).st_size:
                return ""
            file.seek(0)
            told = file.read().decode(errors="replace").strip()
            file.seek(0)
            file.truncate()
            return told

        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(own, 2)
            os.close(own)


@contextmanager
def _limits() -> Iterator[None]:
    """A reader that hangs is stopped; one that wants too much memory gets a MemoryError."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hanging

    handler = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    # Address space is asked for in larger pieces than are used.
    limit = pages * resource.getpagesize() + 2 * MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, handler)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
