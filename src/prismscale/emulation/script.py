"""Runs the user's program in this process exactly as ``torchrun`` would.

``sys.argv``, ``sys.path``, ``__main__`` and the environment are the same.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from prismscale.errors import UsageError


class StopProgram(BaseException):
    """Unwinds the program once it has run enough steps.

    Not an Exception, so that a training loop's ``except Exception`` does not swallow it, while
    ``finally`` blocks still run.
    """


def ignore_breakpoints() -> None:
    """Make ``breakpoint()`` do nothing: a rank has no terminal at which somebody could answer."""
    os.environ["PYTHONBREAKPOINT"] = "0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The user's program and its arguments."""

    target: str
    """Path of a Python file, or a module name with :attr:`is_module`."""
    args: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.target).is_file():
            raise UsageError(
                f"script {self.target!r} is not a file (looked in {os.getcwd()}); "
                "give a path, or a module with -m"
            )

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Script | None:
        """Return the program that an interpreter's arguments name, or None for anything else.

        ``words`` begin at ``-m`` or at the file.
        """
        if words[0:1] == ["-m"] and len(words) > 1:
            return cls(target=words[1], args=tuple(words[2:]), is_module=True)
        if not words or words[0].startswith("-"):
            return None
        return cls(target=words[0], args=tuple(words[1:]))

    @property
    def label(self) -> str:
        """The program's name in messages."""
        return f"-m {self.target}" if self.is_module else self.target

    @property
    def command(self) -> str:
        """The program and its arguments, as a shell would read them.

        Undecodable bytes, which could be neither printed nor written, are escaped.
        """
        text = " ".join([self.label, *map(shlex.quote, self.args)])
        return text.encode("utf-8", "backslashreplace").decode()

    def sources(self) -> list[Path]:
        """Return the files of the program's own code.

        For a script these are the files beside it and the packages there; for a module, all files
        of its package. Code that is installed elsewhere is not included.
        """
        if not self.is_module:
            folder = Path(self.target).resolve().parent
            packages = (p.parent for p in folder.glob("*/__init__.py"))
            return sorted({*folder.glob("*.py"), *(f for p in packages for f in p.rglob("*.py"))})
        # The top-level name only: finding a submodule would run its package.
        found = PathFinder.find_spec(self.target.partition(".")[0], [os.getcwd(), *sys.path])
        if found is None:
            return []
        if found.submodule_search_locations is None:
            return [Path(found.origin)] if found.origin else []
        folders = map(Path, found.submodule_search_locations)
        return sorted(f for folder in folders for f in folder.rglob("*.py"))

    def mentions(self, words: Iterable[str]) -> bool:
        """Return whether one of ``words`` occurs in the program's own code."""
        found = [word.encode() for word in words]
        texts = (file.read_bytes() for file in self.sources())
        return any(word in text for text in texts for word in found)

    def set_up(self) -> None:
        """Set ``sys.argv`` and ``sys.path`` as the interpreter would for this program."""
        sys.argv = [self.target, *self.args]
        folder = os.getcwd() if self.is_module else str(Path(self.target).resolve().parent)
        if sys.path[0] != folder:
            sys.path.insert(0, folder)

    def run(self) -> None:
        """Run to the end or until :class:`StopProgram`; ``SystemExit(0)`` counts as the end."""
        self.set_up()
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except StopProgram:
            return
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
