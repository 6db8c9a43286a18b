"""Progress of long work: a protocol with one implementation for terminals and a silent one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import TextIOBase
from typing import Protocol, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from prismscale.errors import printable


class Terminal(Console):
    """A console that shows escape sequences in its text instead of obeying them.

    Names, paths and messages may come from files of strangers, and a terminal would obey escape
    sequences in them. Markup in the text is not interpreted either.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of ``renderable``, with escape sequences in their text visible."""
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment


class WithoutTrailingBlanks(TextIOBase):
    """A text file that drops trailing blanks, with which tables fill their lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._blanks = ""  # blanks at the end of a line that may continue

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the file; rich draws in ASCII what it cannot encode."""
        return self._file.encoding

    def write(self, text: str) -> int:
        """Write lines, or parts of one."""
        *lines, begun = (self._blanks + text).split("\n")
        kept = begun.rstrip(" ")
        self._blanks = begun[len(kept) :]
        self._file.write("\n".join([*(line.rstrip(" ") for line in lines), kept]))
        return len(text)

    def flush(self) -> None:
        """Flush the file, so that other processes see what was written."""
        self._file.flush()


def terminal(*, stderr: bool = False) -> Terminal:
    """Return the console that every command prints to."""
    file = sys.stderr if stderr else sys.stdout
    if file.isatty():
        return Terminal(stderr=stderr, highlight=False, markup=False)
    # The reader of a pipe sees no colours, and would keep the blanks.
    trimmed = cast(TextIO, WithoutTrailingBlanks(file))
    return Terminal(file=trimmed, highlight=False, markup=False)


class StageUpdate(Protocol):
    """Receives the progress of a stage."""

    def __call__(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` units are done; ``total`` may grow."""
        ...


class NotedUpdate(StageUpdate, Protocol):
    """Receives the progress of a stage, with a note on its current state."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report progress; ``note`` is a few words beside the bar."""
        ...


class Reporter(Protocol):
    """Shows stages of work."""

    def stage(self, name: str) -> AbstractContextManager[NotedUpdate]:
        """Return a context in which one stage runs."""
        ...


class SilentReporter:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str) -> Iterator[NotedUpdate]:
        """Run the stage."""
        yield lambda done, total, note="": None


class TerminalReporter:
    """Shows one line per stage on a terminal, and plain lines where output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str) -> Iterator[NotedUpdate]:
        """Run the stage under a progress bar, and leave one line behind."""
        columns = (
            TextColumn("  {task.fields[stage]:<10}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        # Refresh only twice a second: ranks that are timed meanwhile may need every core.
        with Progress(*columns, console=self._console, refresh_per_second=2) as progress:
            task = progress.add_task("", total=None, stage=name)

            def update(done: int, total: int, note: str = "") -> None:
                progress.update(task, completed=done, total=total, description=note)

            yield update
            found = progress.tasks[0]
            total = found.total or 1
            progress.update(task, completed=total, total=total, description="")
