"""The exception tree. An error a user can cause says what was given, what is
allowed, and how to mend it.

::

    PrismscaleError          1  anything below, or a defect of ours
    ├── UsageError           2  an option, path, preset or combination that cannot be used
    ├── ScriptError          3  the user's program failed on a rank; carries its traceback
    ├── GraphError           4  an illegal execution graph
    │   └── MismatchError    4  members of one group disagree about a communication
    ├── StuckError           5  no rank can advance: who waits for whom, and where
    ├── FormatError          6  a file that is damaged, foreign, or of another version
    ├── StorageError         7  a file that cannot be written (no space, no permission)
    ├── UnmetError           8  something that was asserted of a run does not hold
    └── NoFitError           4  of ``fit``, which builds no graph: the job does not fit

The number is the exit code of the command. Ctrl-C exits with 130, SIGTERM with 143.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

MOST_CHARACTERS = 2_000
"""Of a message about a file: what a damaged or hostile one holds may be of any length."""
MOST_SHOWN = 120
"""Characters of one value of a file, in a message."""
_bounded = reprlib.Repr()
_bounded.maxstring = _bounded.maxother = _bounded.maxlong = MOST_SHOWN


class PrismscaleError(Exception):
    """Base of all errors that prismscale raises on purpose."""

    exit_code = 1


class PrismscaleWarning(UserWarning):
    """Something that may go wrong, and that is tried all the same."""


class UsageError(PrismscaleError):
    """An option, path, preset or combination of them that cannot be used."""

    exit_code = 2


class ScriptError(PrismscaleError):
    """The user's program failed on a rank."""

    exit_code = 3

    def __init__(self, message: str, *, rank: int, traceback: str = "", said: str = "") -> None:
        """``said`` is what the program itself said, without where and when."""
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.said = said


class GraphError(PrismscaleError):
    """An execution graph that breaks the rules written in :mod:`prismscale.graph.verify`."""

    exit_code = 4


class MismatchError(GraphError):
    """Members of one group disagree about a communication (operation, bytes or order)."""


class StuckError(PrismscaleError):
    """No rank can advance any further."""

    exit_code = 5


class FormatError(PrismscaleError):
    """A file that is damaged, foreign, or written by an incompatible version."""

    exit_code = 6

    def __init__(self, message: str) -> None:
        """The message is bounded, and nothing in it is obeyed by a terminal: it may quote the
        file."""
        super().__init__(printable(message[: MOST_CHARACTERS + 1], MOST_CHARACTERS))


class StorageError(PrismscaleError):
    """A file that cannot be written."""

    exit_code = 7


class UnmetError(PrismscaleError):
    """Something that was asserted of a run does not hold."""

    exit_code = 8


class NoFitError(PrismscaleError):
    """The job does not fit into the GPU's memory."""

    exit_code = 4


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """A sentence that lists ``allowed`` and, where one is close to ``given``, offers it.

    Returns for example ``"allowed: a100-80g, h100-sxm; did you mean h100-sxm?"``.
    """
    names = sorted(allowed)
    # Comparing a very long text takes very long.
    close = difflib.get_close_matches(given[:MOST_SHOWN], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"allowed: {', '.join(names)}{hint}"


def printable(text: str, most: int | None = None) -> str:
    """``text`` with what a terminal would obey shown as an escape, and cut after ``most``
    characters. Line ends and tabs stay."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A value of a file in a message: as Python writes it, and not at any length or depth."""
    try:
        return printable(_bounded.repr(value), 2 * MOST_SHOWN)
    except ValueError:
        # A whole number of more digits than Python writes.
        return f"a value of type {type(value).__name__}"
