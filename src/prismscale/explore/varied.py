"""Parser of ``--vary``: a part of the command line, and the alternatives to put there.

``--tp {2,4,8}`` is an option with three values. Text around the braces is the same in all
alternatives. Braces around everything change several arguments together
(``{--tp 2 --pp 8,--tp 4 --pp 4}``) or leave an option out (``{--compile,}``).
``NCCL_ALGO={Ring,Tree}`` is an environment variable. The user may put a name in front:
``tp: --parallelism.tensor_parallel_degree {2,4}``.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from prismscale.emulation.script import Script
from prismscale.errors import UsageError

_NAMED = re.compile(r"([A-Za-z_]\w*):\s+(.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=")
_NUMBER = re.compile(r"-\.?\d")
_OPEN, _CLOSE, _QUOTES = "{[(", "}])", "'\""
_FORM = "for example --vary '--tp {2,4,8}'"
PROGRAMS, RUNS = "-- ", "run "
"""Prefixes that say whose option is varied, where both the program and ``run`` have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument, or an option with its values."""

    tokens: tuple[str, ...]
    of_run: bool = False
    """Whether it is an option of ``prismscale run`` rather than of the program."""

    @property
    def key(self) -> str:
        """Its name on a command line: ``--tp``, or ``model.tp`` of ``model.tp=4``; else empty."""
        head, equals, _ = self.tokens[0].partition("=")
        return head if equals or is_option(head) else ""

    @property
    def n_values(self) -> int:
        """Number of values that follow the option's name."""
        return len(self.tokens) - 1 + ("=" in self.tokens[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One of the alternatives in the braces."""

    value: str
    """The value as tables show it and as ``--where`` compares it."""
    arguments: tuple[Argument, ...] = ()
    setting: str | None = None
    """Value of the environment variable; None: the variable is not set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Varied:
    """One ``--vary``, parsed."""

    name: str
    """Name of the varied value; an identifier."""
    given: str
    """Text of the ``--vary`` as the user wrote it."""
    variable: str = ""
    """Name of the environment variable; empty where arguments are varied."""
    alternatives: tuple[Alternative, ...]

    @property
    def keys(self) -> set[tuple[bool, str]]:
        """Named arguments that it sets, each as (whether it is an option of ``run``, key)."""
        found = (a for alternative in self.alternatives for a in alternative.arguments)
        return {(argument.of_run, argument.key) for argument in found if argument.key}

    def example(self, key: str) -> Argument:
        """Return the first argument with this key."""
        found = (a for alternative in self.alternatives for a in alternative.arguments)
        return next(a for a in found if a.key == key)


def parse_all(
    texts: Sequence[str], *, run_options: Collection[str], program: Sequence[str]
) -> tuple[Varied, ...]:
    """Parse all ``--vary``.

    Args:
        texts: the texts as the user wrote them.
        run_options: options of ``prismscale run``; all others belong to the program.
        program: the program's own arguments.

    Raises:
        UsageError: a text cannot be read, or two vary the same argument or have the same name.
    """
    if not texts:
        raise UsageError(f"nothing is varied: give --vary, {_FORM}")
    found = [_parse(text, run_options, program) for text in texts]
    times = Counter(key for varied in found for key in varied.keys)
    times.update((False, f"{v.variable}=") for v in found if v.variable)
    twice = [key for (_, key), n in times.items() if n > 1]
    if twice:
        raise UsageError(
            f"{twice[0].rstrip('=')} is varied twice: put all its values in one --vary"
        )
    short = tuple(_with_short_names(found))
    same = [name for name, n in Counter(v.name for v in short).items() if n > 1]
    if same:
        raise UsageError(
            f"two --vary are called {same[0]}: give one a name of its own, as in 'tp: --tp {{2,4}}'"
        )
    return short


def _parse(text: str, run_options: Collection[str], program: Sequence[str]) -> Varied:
    named = _NAMED.fullmatch(text.strip())
    name, rest = (named[1], named[2]) if named else ("", text.strip())
    forced = next((mark for mark in (PROGRAMS, RUNS) if rest.startswith(mark)), "")
    before, inner, after = _braces(rest.removeprefix(forced), text)
    values = [part.strip() for part in _split(inner)]
    variable = "" if forced else _variable_of(before)
    _check_values(values, text, may_be_empty=bool(variable) or not (before + after).strip())
    if variable:
        start = before.partition("=")[2]
        plain = (_unquoted(value) for value in values)
        return Varied(
            name=name or variable,
            given=text,
            variable=variable,
            alternatives=tuple(
                Alternative(value=v, setting=f"{start}{v}{after}" if v else None) for v in plain
            ),
        )
    alternatives = []
    for value in values:
        arguments = tuple(
            Argument(tokens=part, of_run=_is_runs(part[0], forced, run_options, program, text))
            for part in _parts(_tokens(f"{before}{value}{after}", text))
        )
        alternatives.append(Alternative(value=_unquoted(value), arguments=arguments))
    found = Varied(name=name, given=text, alternatives=tuple(alternatives))
    return found if name else replace(found, name=_name_of(found))


def _variable_of(before: str) -> str:
    found = _VARIABLE.match(before)
    return found[1] if found else ""


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in _QUOTES
    return value[1:-1] if quoted else value


def _braces(text: str, given: str) -> tuple[str, str, str]:
    """Split a text into the parts before, between and after the braces."""
    first = text.find("{")
    last = next((i for i, d in _depths(text, first) if d == 0), -1) if first >= 0 else -1
    if last < 0:
        raise UsageError(f"--vary {given!r} has no {{…}} with what to put there; {_FORM}")
    before, inner, after = text[:first], text[first + 1 : last], text[last + 1 :]
    if "{" in after:
        raise UsageError(
            f"--vary {given!r} has two {{…}}: give a --vary for each, or braces around everything"
        )
    return before, inner, after


def _depths(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Yield each index from ``start`` on that is outside quotes, and the brackets open after it."""
    depth, quote = 0, ""
    for i in range(start, len(text)):
        c = text[i]
        if quote:
            quote = "" if c == quote else quote
            continue
        if c in _QUOTES:
            quote = c
            continue
        depth += (c in _OPEN) - (c in _CLOSE)
        yield i, depth


def _split(inner: str) -> list[str]:
    """Split at commas outside further brackets and quotes."""
    cuts = [i for i, depth in _depths(inner, 0) if depth == 0 and inner[i] == ","]
    return [inner[a + 1 : b] for a, b in zip([-1, *cuts], [*cuts, len(inner)], strict=True)]


def _check_values(values: Sequence[str], text: str, *, may_be_empty: bool) -> None:
    if values == [""]:
        raise UsageError(f"--vary {text!r}: the braces are empty; {_FORM}")
    twice = [value for value, n in Counter(values).items() if n > 1]
    if twice:
        raise UsageError(f"--vary {text!r} has {twice[0]!r} twice")
    if "" in values and not may_be_empty:
        raise UsageError(
            f"--vary {text!r}: a value is empty; an option is left out with braces around all of "
            "it: {--option 2,}"
        )


def _tokens(text: str, given: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--vary {given!r} cannot be read: {error}") from error


def _parts(tokens: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each option together with the tokens up to the next option."""
    if not tokens:
        return
    starts = [i for i, token in enumerate(tokens) if i == 0 or is_option(token)]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        yield tuple(tokens[start:stop])


def is_option(token: str) -> bool:
    """Whether a token is an option: ``--tp`` and ``-x``, but neither ``-1`` nor ``-``."""
    return token.startswith("-") and len(token) > 1 and not _NUMBER.match(token)


def _is_runs(
    token: str, forced: str, run_options: Collection[str], program: Sequence[str], text: str
) -> bool:
    option = token.partition("=")[0]
    if forced == PROGRAMS or option not in run_options:
        if forced == RUNS:
            raise UsageError(f"--vary {text!r}: prismscale run has no {option}")
        return False
    if not forced and any(option == argument.partition("=")[0] for argument in program):
        raise UsageError(
            f"--vary {text!r}: both prismscale run and the program have {option}; write "
            f"'{PROGRAMS}{text}' for the program's or '{RUNS}{text}' for run's"
        )
    return True


def _name_of(varied: Varied) -> str:
    arguments = [a for alternative in varied.alternatives for a in alternative.arguments]
    key = next((a.key for a in arguments if a.key), "argument")
    return re.sub(r"\W", "_", key.lstrip("-")) or "argument"


def _with_short_names(found: Sequence[Varied]) -> Iterator[Varied]:
    """Replace each name by the last part of its option's key, where no other has that name.

    ``parallelism.tensor_parallel_degree`` becomes ``tensor_parallel_degree``. Names that the user
    gave and names of environment variables stay."""
    short = [v.name if v.variable else _last_part(v) or v.name for v in found]
    names = [v.name for v in found]
    for varied, name in zip(found, short, strict=True):
        is_own = _NAMED.fullmatch(varied.given.strip()) is not None
        unique = short.count(name) == 1 and (name == varied.name or name not in names)
        yield varied if is_own or not unique else replace(varied, name=name)


def _last_part(varied: Varied) -> str:
    keys = [a.key for alternative in varied.alternatives for a in alternative.arguments if a.key]
    return re.sub(r"\W", "_", keys[0].lstrip("-").rpartition(".")[2]) if keys else ""


def unheard_of(
    varied: Sequence[Varied], script: Script, run_options: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield varied options of the program that look misspelled, each with the option it resembles.

    Neither the program's arguments nor its own files mention them, and they resemble a known
    option. They may still be right, because libraries read options, too.
    """
    known = {argument.partition("=")[0] for argument in script.args}
    options = {key for v in varied for of_run, key in v.keys if not of_run and is_option(key)}
    left = sorted(options - known)
    text = "".join(path.read_text(errors="replace") for path in script.sources()) if left else ""
    for option in left:
        # Search for the option itself and for the name under which a parser stores its value.
        words = {option.lstrip("-").rpartition(".")[2], option.lstrip("-")}
        if not any(form in text for word in words for form in (word, word.replace("-", "_"))):
            close = difflib.get_close_matches(option, [*known, *run_options], n=1, cutoff=0.75)
            if close:
                yield option, close[0]
