"""The user's file of rules: Python, which ranks execute, or TOML, which is data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prismscale.errors import UsageError

if TYPE_CHECKING:
    from prismscale.payload.rules.rule import Rule

ALLOWED = "give FILE.py, with functions under @prismscale.payload_rule, or FILE.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleFile:
    """A file given by ``--rules``."""

    path: str
    """Absolute path."""

    @staticmethod
    def parse(text: str) -> RuleFile:
        """Check the file without executing it.

        Raises:
            UsageError: there is no such file, or it is not valid Python.
            FormatError: it is not valid TOML, or describes no rules.
        """
        path = Path(text)
        if path.suffix not in (".py", ".toml"):
            raise UsageError(f"--rules {text}: neither Python nor TOML by its name; {ALLOWED}")
        if not path.is_file():
            raise UsageError(f"--rules {text}: there is no such file; {ALLOWED}")
        file = RuleFile(path=str(path.absolute()))
        if path.suffix == ".toml":
            file.rules()  # it is data, so reading it executes nothing
        else:
            file._compile()
        return file

    @property
    def digest(self) -> str:
        """Digest of the file's content."""
        return hashlib.sha256(Path(self.path).read_bytes()).hexdigest()

    def rules(self) -> tuple[Rule, ...]:
        """Return the rules of the file, in its order. A Python file is executed.

        Raises:
            UsageError: the file fails, has no rules, or has two rules of one name.
            FormatError: the file is TOML that describes no rules.
        """
        # Rules import torch, so they are imported only for a job that has some.
        from prismscale.payload.rules.rule_reading import rules_in

        path = Path(self.path)
        found = tuple(rules_in(path))
        if not found:
            raise UsageError(f"{path.name} has no rules; {ALLOWED} with [[rule]] tables")
        names = [rule.name for rule in found]
        for rule in found:
            if names.count(rule.name) > 1:
                raise UsageError(f"{path.name}: two rules have the name {rule.name!r}; rename one")
        return found

    def _compile(self) -> None:
        try:
            compile(Path(self.path).read_bytes(), self.path, "exec")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or "?"
            raise UsageError(f"--rules {self.path}:{line}: not valid Python: {error}") from error
