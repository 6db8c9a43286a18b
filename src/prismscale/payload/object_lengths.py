"""Lengths of pickled objects in transit, the same on all ranks and in every step.

In a real job the lengths of all ranks' pickles meet in each object collective, and the longest
decides. Captured ranks do not meet: each knows its own pickle only, and offsets and names make it
a few bytes longer or shorter than its peer's. So a length is rounded up, to one of eight in each
power of two, and the length that the first rank of a job chose for a call holds for all later
ranks. The same call in a later step keeps its length, unless the length of the rank's own pickle
has changed by more than a sixteenth.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from prismscale.errors import FormatError, StorageError
from prismscale.files import part_of

_SHORTEST = 64
_STEPS = 8
"""Number of allowed lengths in each power of two."""
_ALIKE = 16
"""Pickles of one call count as alike if their lengths differ by at most one part in this many."""
_DEEPEST = 64

Place = tuple[object, ...]
"""The collective and the stack that calls it: the same in each step."""


@dataclass(frozen=True, slots=True)
class Call:
    """One object collective of the program."""

    name: str
    """The same on all ranks."""
    place: Place


class ObjectLengths:
    """Lengths that a job's ranks agree on through a folder; without one a rank chooses alone."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._numbers: Counter[str] = Counter()
        self._chosen: dict[tuple[Place, int], tuple[int, int]] = {}
        """This rank's own length and the agreed length, by place and index."""

    @contextmanager
    def shared_in(self, folder: Path) -> Iterator[None]:
        """While the block runs, agree with the ranks that share ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        try:
            yield
        finally:
            self._folder = None
            self.forget()

    def forget(self) -> None:
        """Start again: the next call of any collective counts as a program's first."""
        self._numbers.clear()
        self._chosen.clear()

    def next_call(self, collective: str, group_index: int) -> Call:
        """Note that the program calls ``collective`` on its group ``group_index``."""
        kind = f"{collective}.r{group_index}"
        self._numbers[kind] += 1
        name = f"{kind}.n{self._numbers[kind]}"
        return Call(name, (kind, *_stack(sys._getframe(1))))

    def agreed(self, call: Call, index: int, own: int) -> int:
        """Return the length that all ranks use for the ``index``-th object of ``call``.

        ``own`` is the length of this rank's pickle in bytes.

        Raises:
            StorageError: the folder cannot be written to.
            FormatError: the folder holds something else under that name.
        """
        before, length = self._chosen.get((call.place, index), (-own, 0))
        if _ALIKE * abs(own - before) > own:
            length = self._first_choice(f"{call.name}.{index}", rounded(own))
            self._chosen[call.place, index] = own, length
        return length

    def _first_choice(self, name: str, own: int) -> int:
        if self._folder is None:
            return own
        path = self._folder / f"{name}.length"
        if not path.exists():
            _write_first(path, own)
        try:
            return int(path.read_text())
        except (OSError, ValueError) as error:
            raise FormatError(
                f"{path} does not hold the length of an object: {error}; delete the run folder's "
                "payloads and capture again"
            ) from error


def rounded(length: int) -> int:
    """Round a length up to the next one that is allowed.

    >>> [rounded(n) for n in (5, 64, 65, 1000, 184_340, 184_795)]
    [64, 64, 72, 1024, 196608, 196608]
    """
    if length <= _SHORTEST:
        return _SHORTEST
    step = (1 << ((length - 1).bit_length() - 1)) // _STEPS
    return -(-length // step) * step


def _stack(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield the file and line of each caller, innermost first."""
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _write_first(path: Path, length: int) -> None:
    """Write the file unless another rank has. It appears whole or not at all."""
    part = part_of(path)
    try:
        part.write_text(str(length))
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
