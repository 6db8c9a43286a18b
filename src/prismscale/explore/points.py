"""The points of a sweep: each combination of what is varied, as arguments of ``prismscale run``."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from prismscale.explore.varied import Argument, Varied, is_option
from prismscale.explore.where import Condition

MOST_COMBINATIONS = 100_000
MOST_POINTS = 10_000
_LONGEST_NAME = 80
"""Most characters of a folder's name before the digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseCommand:
    """The command line of which the points are variants."""

    options: tuple[tuple[str, tuple[str, ...]], ...]
    """Options of ``prismscale run``: the name of each, and its tokens, which begin with it."""
    script: Script
    """The program, with its arguments."""
    repeatable: frozenset[str] = frozenset()
    """Options of ``run`` that may be given several times."""

    def program_arguments(self, args: Sequence[str]) -> list[str]:
        """Return the end of the command line: the program with these arguments."""
        if self.script.is_module:
            return ["-m", self.script.target, "--", *args]
        return ["--", self.script.target, *args]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One command line of a sweep."""

    values: Mapping[str, str]
    """The chosen value of each varied name, in the order of the command line."""
    arguments: tuple[str, ...]
    """Arguments of ``prismscale run``, without ``--out``."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that the point sets; None removes the variable."""

    @property
    def label(self) -> str:
        """The values as text: ``tp=2 pp=4``."""
        return " ".join(f"{name}={value or '–'}" for name, value in self.values.items())

    @property
    def digest(self) -> str:
        """Hash of the command: equal for points with the same arguments and environment."""
        text = json.dumps([self.arguments, sorted(self.environment.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def folder_name(self) -> str:
        """Name of the point's run folder."""
        words = re.sub(r"[^\w.=-]+", "-", self.label, flags=re.ASCII).strip("-.")
        return f"{words[:_LONGEST_NAME]}-{self.digest}".lstrip("-")


def points_of(base: BaseCommand, varied: Sequence[Varied], where: str = "") -> list[SweepPoint]:
    """Return all combinations for which the condition ``where`` holds, each command once.

    Raises:
        UsageError: no combination is left, or too many are, or the condition cannot be evaluated.
    """
    combinations = math.prod(len(v.alternatives) for v in varied)
    if combinations > MOST_COMBINATIONS:
        raise UsageError(f"{combinations:,} combinations; allowed: {MOST_COMBINATIONS:,}")
    condition = Condition(where, [v.name for v in varied])
    found: dict[str, SweepPoint] = {}
    for chosen in itertools.product(*(range(len(v.alternatives)) for v in varied)):
        values = {v.name: v.alternatives[i].value for v, i in zip(varied, chosen, strict=True)}
        if condition.holds(values):
            point = _point(base, varied, chosen, values)
            found.setdefault(point.digest, point)
    if not found:
        raise UsageError(f"--where {where!r} holds for none of {combinations:,} combinations")
    if len(found) > MOST_POINTS:
        raise UsageError(
            f"{len(found):,} points; allowed: {MOST_POINTS:,}. Narrow the sweep with --where"
        )
    return list(found.values())


def _point(
    base: BaseCommand, varied: Sequence[Varied], chosen: Sequence[int], values: Mapping[str, str]
) -> SweepPoint:
    options, program = list(base.options), list(base.script.args)
    environment: dict[str, str | None] = {}
    for one, index in zip(varied, chosen, strict=True):
        alternative = one.alternatives[index]
        if one.variable:
            environment[one.variable] = alternative.setting
            continue
        set_now = {(a.of_run, a.key) for a in alternative.arguments}
        # Remove arguments that only other alternatives set.
        for of_run, key in sorted(one.keys - set_now):
            if of_run:
                options = [option for option in options if option[0] != key]
            else:
                program = _replaced(program, one.example(key), ())
        for argument in alternative.arguments:
            if argument.of_run:
                keep = argument.key in base.repeatable
                options = [option for option in options if keep or option[0] != argument.key]
                options.append((argument.key, argument.tokens))
            else:
                program = _replaced(program, argument, argument.tokens)
    arguments = [token for _, tokens in options for token in tokens]
    return SweepPoint(
        values=values,
        arguments=(*arguments, *base.program_arguments(program)),
        environment=environment,
    )


def _replaced(program: Sequence[str], like: Argument, tokens: Sequence[str]) -> list[str]:
    """Return ``program`` with ``tokens`` in place of the argument that has the key of ``like``.

    Up to as many values as ``like`` has are replaced along with it. Without such an argument, the
    tokens are appended."""
    places = [i for i, token in enumerate(program) if token.partition("=")[0] == like.key]
    if not places or not like.key:
        return [*program, *tokens]
    # Where an option is given several times, the last one counts.
    place = places[-1]
    stop = place + 1
    if "=" not in program[place]:
        most = place + 1 + like.n_values
        while stop < min(most, len(program)) and not is_option(program[stop]):
            stop += 1
    return [*program[:place], *tokens, *program[stop:]]
