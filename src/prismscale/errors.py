"""The exception tree.

An error that a user can cause says what was given, what is allowed, and how to fix it::

    PrismscaleError          1  any error below, or a defect of prismscale
    ├── UsageError           2  an option, path, preset or combination that cannot be used
    ├── ScriptError          3  the user's program failed on a rank; carries its traceback
    ├── GraphError           4  an illegal execution graph
    │   └── MismatchError    4  members of one group disagree about a communication
    ├── StuckError           5  no rank can advance; says which rank waits for which, and where
    ├── FormatError          6  a file that is damaged, foreign, or of another version
    ├── StorageError         7  a file that cannot be written (no space, no permission)
    ├── UnmetError           8  an assertion about a run does not hold
    └── NoFitError           4  the job does not fit; only ``fit``, which builds no graph, raises it

The number is the exit code of the command. Ctrl-C exits with 130, SIGTERM with 143.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

MOST_CHARACTERS = 2_000
"""Length limit of a message about a file: a damaged or hostile file may hold text of any length."""
MOST_SHOWN = 120
"""Length limit of one value of a file, in a message."""
_bounded = reprlib.Repr()
_bounded.maxstring = _bounded.maxother = _bounded.maxlong = MOST_SHOWN


class PrismscaleError(Exception):
    """Base of all errors that prismscale raises on purpose."""

    exit_code = 1


class PrismscaleWarning(UserWarning):
    """Warns of something that may fail but is tried nevertheless."""


class UsageError(PrismscaleError):
    """An option, path, preset or combination of them that cannot be used."""

    exit_code = 2


class ScriptError(PrismscaleError):
    """The user's program failed on a rank."""

    exit_code = 3

    def __init__(self, message: str, *, rank: int, traceback: str = "", said: str = "") -> None:
        """``said`` is the program's own message, without the rank and the stage of the run."""
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
        """Bound the message and escape what a terminal would obey: it may quote the file."""
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
    """Return a text that lists ``allowed`` and suggests the name closest to ``given``, if any is.

    For example ``"allowed: a100-80g, h100-sxm; did you mean h100-sxm?"``.
    """
    names = sorted(allowed)
    # Comparing a very long text takes a very long time.
    close = difflib.get_close_matches(given[:MOST_SHOWN], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"allowed: {', '.join(names)}{hint}"


def printable(text: str, most: int | None = None) -> str:
    """Cut ``text`` after ``most`` characters, and escape control characters for a terminal.

    Line ends and tabs stay.
    """
    if most is not None and len(text) > most:
        text = f"{text[:most]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value of a file for a message: its ``repr``, limited in length and depth."""
    try:
        return printable(_bounded.repr(value), 2 * MOST_SHOWN)
    except ValueError:
        # A whole number with more digits than Python converts to text.
        return f"a value of type {type(value).__name__}"
