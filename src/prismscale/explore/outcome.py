"""The outcome of one point of a sweep: its figures, or why there are none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from prismscale.errors import PrismscaleError, ScriptError, StorageError
from prismscale.typed_files import load_json, save_json

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
_FRAMES = str.maketrans(dict.fromkeys("╭╮╰╯│─┌┐└┘━┃┏┓┗┛", " "))
_TELLING = re.compile(r"error|invalid|unrecogni[sz]ed|unknown|required|must|cannot", re.IGNORECASE)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
LONGEST = 160
"""Most characters of a reason. A first sentence that is longer is kept whole."""


class Status(Enum):
    """How a point ended."""

    DONE = "done"
    TOO_LARGE = "does not fit"
    """The program ran out of the GPU's memory."""
    REFUSED = "refused"
    """The program or prismscale refused the point, and would refuse it again."""
    BROKEN = "broken"
    """Something other than the point itself ended it. A second command runs it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one point. Unknown figures are None or empty."""

    WHAT = "the outcome of a point"

    key: str
    """Hash of everything on which the outcome depends. With another key, the point runs again."""
    status: Status
    reason: str = ""
    """Why it has no figures, in the words of the program or of prismscale."""
    error: str = ""
    """Name of the exception class."""
    world_size: int = 0
    cluster: str = ""
    step_ns: int | None = None
    """Step time without variation."""
    p50_ns: int | None = None
    """Median step time as ``prismscale run`` shows it; basis of tokens a second and utilisation."""
    p95_ns: int | None = None
    tokens_per_step: int | None = None
    tokens_given: bool = False
    """Whether the user gave ``tokens_per_step``; otherwise it was found in the run."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 … 1."""
    peak_bytes: int | None = None
    """Highest allocated bytes of any captured rank."""
    reserved_bytes: int | None = None
    """Highest bytes reserved by torch's allocator on any stage."""
    held_bytes: int | None = None
    """Bytes held on the fullest GPU: reserved by torch's allocator, and outside of it."""
    memory_bytes: int | None = None
    """Memory of the GPU."""
    computation: float | None = None
    """Computation as a share of the step, over all ranks. The next three are such shares, too."""
    exposed: float | None = None
    """Communication that no computation hides."""
    bubble: float | None = None
    skew: float | None = None
    captured: int = 0
    """Number of captured ranks, which ran the program."""

    @property
    def fits(self) -> bool | None:
        """Whether the GPU's memory is enough; None if unknown."""
        if self.status is Status.TOO_LARGE:
            return False
        if self.held_bytes is None or self.memory_bytes is None:
            return None
        return self.held_bytes <= self.memory_bytes

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of the whole job, at the median step."""
        if not self.tokens_per_step or not self.p50_ns:
            return None
        return self.tokens_per_step / (self.p50_ns / 1e9)

    @property
    def is_final(self) -> bool:
        """Whether a second command reuses it instead of running the point again."""
        return self.status is not Status.BROKEN

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote. Raises :class:`FormatError`."""
        return load_json(cls, path, cls.WHAT)


def failed(key: str, error: PrismscaleError) -> Outcome:
    """Return the outcome of a point that ``error`` ended."""
    said = error.said if isinstance(error, ScriptError) else ""
    reason = sentence(said) if said else str(error).partition("\n")[0]
    return Outcome(key=key, status=_status(error, said), reason=reason, error=type(error).__name__)


def _status(error: PrismscaleError, said: str) -> Status:
    if isinstance(error, StorageError) or type(error) is PrismscaleError:
        return Status.BROKEN
    if isinstance(error, ScriptError):
        if not said:
            return Status.BROKEN  # a signal ended it, for example because the host had no memory
        if _OUT_OF_MEMORY.search(said):
            return Status.TOO_LARGE
    return Status.REFUSED


def sentence(said: str) -> str:
    """Return the most telling line of an output, cut to its first sentences.

    That is the last line that speaks of an error, or else the last line."""
    lines = [line.translate(_FRAMES).strip() for line in said.splitlines()]
    lines = [line for line in lines if any(c.isalnum() for c in line)]
    if not lines:
        return said.strip()
    telling = [line for line in lines if _TELLING.search(line)]
    line = (telling or lines)[-1] if len(lines) > 1 else lines[0]
    found, *more = _BETWEEN_SENTENCES.split(line)
    for one in more:
        if len(found) + 1 + len(one) > LONGEST:
            break
        found = f"{found} {one}"
    return found
