"""How long pickled objects are on their way, so that all ranks say the same, in every step.

In a real job the lengths of all ranks' pickles meet in each object collective, and the longest
decides. Captured ranks do not meet: each knows its own pickle only, and offsets and names make it
a few bytes longer or shorter than its peer's. So a length is rounded up, to one of eight in each
power of two, and what the first rank of a job chose for a call holds for all that come later. The
same call of a later step keeps it, unless the rank's own pickle has become another.
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
"""Lengths to choose from in each power of two."""
_ALIKE = 16
"""Pickles of one call are alike in all steps if they differ by less than one part in so many."""
_DEEPEST = 64

Place = tuple[object, ...]
"""Where the program calls, and what: the same in each step."""


@dataclass(frozen=True, slots=True)
class Call:
    """One object collective of the program."""

    name: str
    """Alike on all ranks."""
    place: Place


class ObjectLengths:
    """Lengths that the ranks of a job agree on through a folder; alone without one."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._numbers: Counter[str] = Counter()
        self._chosen: dict[tuple[Place, int], tuple[int, int]] = {}
        """By place and index: this rank's own length, and what was agreed on for it."""

    @contextmanager
    def shared_in(self, folder: Path) -> Iterator[None]:
        """Meanwhile, agree with the ranks that share ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        try:
            yield
        finally:
            self._folder = None
            self.forget()

    def forget(self) -> None:
        """The next call of any collective is a program's first."""
        self._numbers.clear()
        self._chosen.clear()

    def next_call(self, collective: str, group_index: int) -> Call:
        """The program calls ``collective`` on its group ``group_index``."""
        kind = f"{collective}.r{group_index}"
        self._numbers[kind] += 1
        name = f"{kind}.n{self._numbers[kind]}"
        return Call(name, (kind, *_stack(sys._getframe(1))))

    def agreed(self, call: Call, index: int, own: int) -> int:
        """What all ranks take for the ``index``-th object of ``call``, where this one's pickle has
        ``own`` bytes.

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
    """The next longer of the lengths that are used.

    >>> [rounded(n) for n in (5, 64, 65, 1000, 184_340, 184_795)]
    [64, 64, 72, 1024, 196608, 196608]
    """
    if length <= _SHORTEST:
        return _SHORTEST
    step = (1 << ((length - 1).bit_length() - 1)) // _STEPS
    return -(-length // step) * step


def _stack(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Lines that lead here, innermost first."""
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _write_first(path: Path, length: int) -> None:
    """Write the file unless another rank did: it appears whole, or not at all."""
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
