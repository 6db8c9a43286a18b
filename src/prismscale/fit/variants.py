"""Changes of a program's options or environment: ``--tp 8``, ``NAME=VALUE --mode full``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prismscale.emulation.script import Script
from prismscale.errors import UsageError

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A variant's changes to the program's options and environment."""

    text: str = ""
    """The change as the user wrote it; empty for none."""
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Change:
        """Parse ``NAME=VALUE … --option value …``, as a shell would.

        Raises:
            UsageError: the text is empty, or a shell could not parse it.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--try {text!r}: {error}") from error
        environment: dict[str, str] = {}
        while words and (found := _VARIABLE.fullmatch(words[0])):
            environment[found[1]] = found[2]
            words.pop(0)
        if not words and not environment:
            raise UsageError(
                f"--try {text!r}: give options of the program, for example --try '--tp 8', or "
                "variables before them, for example "
                "--try PYTORCH_ALLOC_CONF=expandable_segments:True"
            )
        return Change(text=text, environment=environment, arguments=tuple(words))

    def of(self, script: Script) -> Script:
        """Return ``script`` with the change applied."""
        return replace(script, args=changed(script.args, self.arguments))


def changed(arguments: Sequence[str], change: Sequence[str]) -> tuple[str, ...]:
    """Return ``arguments`` with the options of ``change`` appended.

    Earlier occurrences of the same options are removed, each with as many values as it has in
    ``change`` and with further numbers after a number: other words are the program's own, such as
    overrides of a configuration. ``--no-x`` also removes ``--x``, and the other way round.
    """
    kept = list(arguments)
    for option, values in _options(change):
        if not option:
            kept += values
            continue
        for name in {option, _opposite(option)}:
            kept = _without(kept, name, n_values=len(values))
        kept += [option, *values]
    return tuple(kept)


def _options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with its values; words before the first option have an empty name."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            found.append(("", [word]))
    return found


def _without(words: list[str], option: str, *, n_values: int) -> list[str]:
    kept: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith(f"{option}="):
            continue
        if word != option:
            kept.append(word)
            continue
        first, stop = place, place + n_values
        while n_values and place < len(words) and not _is_option(words[place]):
            if place >= stop and not (_is_number(words[first]) and _is_number(words[place])):
                break
            place += 1
    return kept


def _is_option(word: str) -> bool:
    return word.startswith("-") and not _is_number(word)


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", word) is not None


def _opposite(option: str) -> str:
    head, _, name = option.rpartition("--")
    return f"{head}--{name[3:]}" if name.startswith("no-") else f"{head}--no-{name}"
