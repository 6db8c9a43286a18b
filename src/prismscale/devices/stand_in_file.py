"""Stand-in by the user for an extension that exists only as a CUDA binary."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from prismscale.errors import UsageError

_ALLOWED = "give FILE.py, which answers the import of FILE, or MODULE=FILE.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInFile:
    """A Python file that a null device imports in place of a module."""

    module: str
    path: str
    """Absolute path of the file."""

    @staticmethod
    def parse(text: str) -> StandInFile:
        """Read ``my_kernels.py`` or ``my_package._C=stand_ins/c.py``.

        Raises:
            UsageError: the file does not exist, or the name cannot be that of a module.
        """
        name, equals, file = text.rpartition("=")
        path = Path(file)
        module = name if equals else path.stem
        if path.suffix != ".py" or not path.is_file():
            raise UsageError(f"--stand-in {text}: {file!r} is no Python file; {_ALLOWED}")
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"--stand-in {text}: {module!r} is no name of a module; {_ALLOWED}")
        return StandInFile(module=module, path=str(path.absolute()))

    @property
    def digest(self) -> str:
        """A text that changes with the module's name and the file's content."""
        content = hashlib.sha256(Path(self.path).read_bytes()).hexdigest()
        return f"{self.module}:{content}"
