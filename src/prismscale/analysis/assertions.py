"""Conditions on a run's figures, for CI: ``reserved<76GiB``, ``hidden(dp)>0.9``, ``step<1.3s``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prismscale.analysis.answers import Answers, MemoryFit, meant
from prismscale.errors import UsageError, did_you_mean

_FORM = re.compile(
    r"\s*([a-z0-9_]+)\s*(?:\(([^)]*)\))?\s*(<=|>=|<|>)\s*([0-9.]+(?:e[+-]?\d+)?)\s*(\S*)\s*"
)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 1e6, "GB": 1e9}
_TIMES = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_SHARES = {"": 1.0, "%": 0.01}
_NUMBERS = {"": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The figures that a condition can name."""

    fit: MemoryFit | None
    answers: Answers | None = None
    """None where only memory is known."""


def _of_fit(read: Callable[[MemoryFit], float]) -> Callable[[Known], float | None]:
    return lambda known: None if known.fit is None else read(known.fit)


def _of_run(read: Callable[[Answers], float | None]) -> Callable[[Known], float | None]:
    return lambda known: None if known.answers is None else read(known.answers)


_FIGURES: dict[str, tuple[dict[str, float], Callable[[Known], float | None]]] = {
    "reserved": (_BYTES, _of_fit(lambda fit: fit.reserved_bytes)),
    "allocated": (_BYTES, _of_fit(lambda fit: fit.allocated_bytes)),
    "held": (_BYTES, _of_fit(lambda fit: fit.held_bytes)),
    "headroom": (_BYTES, _of_fit(lambda fit: fit.headroom_bytes)),
    "step": (_TIMES, _of_run(lambda found: found.step_ns)),
    "p50": (_TIMES, _of_run(lambda found: None if found.p95_ns is None else found.step_ns)),
    "p95": (_TIMES, _of_run(lambda found: found.p95_ns)),
    "tokens_per_s": (_NUMBERS, _of_run(lambda found: found.tokens_per_s)),
    "tokens_per_s_per_gpu": (_NUMBERS, _of_run(lambda found: found.tokens_per_s_per_gpu)),
    "mfu": (_SHARES, _of_run(lambda found: found.mfu)),
    "hfu": (_SHARES, _of_run(lambda found: found.hfu)),
    "host": (_SHARES, _of_run(lambda found: found.host)),
    "bubble": (_SHARES, _of_run(lambda found: found.bubble)),
}
_OF_GROUPS = ("hidden", "exposed")
OF_MEMORY = ("reserved", "allocated", "held", "headroom")
"""Figures that are known where only memory is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assertion:
    """One condition on a figure: ``figure comparison limit``."""

    text: str
    figure: str
    group: str
    """Group of ``hidden`` and ``exposed``; empty for other figures."""
    comparison: str
    limit: float
    """In nanoseconds or bytes, or a share or plain number."""
    unit: str

    @staticmethod
    def parse(text: str, *, among: Sequence[str] = ()) -> Assertion:
        """Parse one condition.

        Args:
            text: ``figure comparison limit``.
            among: the figures that the command finds; empty: all.

        Raises:
            UsageError: ``text`` is no condition, or its figure or unit does not exist, or the
                command does not find the figure.
        """
        found = _FORM.fullmatch(text)
        names = [*_FIGURES, *(f"{name}(GROUP)" for name in _OF_GROUPS)]
        if found is None:
            raise UsageError(
                f"--assert {text!r}: give FIGURE<VALUE, for example reserved<76GiB, "
                f"hidden(dp)>0.9 or step<1.3s; figures: {', '.join(names)}"
            )
        figure, group, comparison, number, unit = found.groups()
        if (figure in _OF_GROUPS) != bool(group) or figure not in (*_FIGURES, *_OF_GROUPS):
            raise UsageError(
                f"--assert {text!r}: there is no such figure; {did_you_mean(figure, names)}"
            )
        if among and figure not in among:
            raise UsageError(
                f"--assert {text!r}: this command does not find {figure}; it finds "
                f"{', '.join(among)}"
            )
        units = _SHARES if group else _FIGURES[figure][0]
        if unit not in units:
            allowed = ", ".join(u or "a bare number" for u in units)
            given = unit or "no unit"
            raise UsageError(f"--assert {text!r}: {figure} in {given}; allowed: {allowed}")
        try:
            limit = float(number) * units[unit]
        except ValueError:
            raise UsageError(f"--assert {text!r}: {number!r} is not a number") from None
        return Assertion(
            text=text,
            figure=figure,
            group=group or "",
            comparison=comparison,
            limit=limit,
            unit=unit,
        )

    def failure(self, known: Known) -> str:
        """Say why the condition does not hold. Returns an empty string if it holds.

        Raises:
            UsageError: the figure is not among the known ones.
        """
        for name, value in self._values(known):
            if not _COMPARISONS[self.comparison](value, self.limit):
                return f"{self.text}: {name} is {self._shown(value)}"
        return ""

    def _values(self, known: Known) -> list[tuple[str, float]]:
        if not self.group:
            value = _FIGURES[self.figure][1](known)
            if value is None:
                raise UsageError(
                    f"--assert {self.text!r}: this command does not find {self.figure}"
                )
            return [(self.figure, value)]
        groups = meant(known.answers.groups if known.answers else (), self.group)
        if not groups:
            names = [g.name for g in known.answers.groups] if known.answers else []
            raise UsageError(
                f"--assert {self.text!r}: no group {self.group!r} communicates; "
                f"{did_you_mean(self.group, names)}"
            )
        if self.figure == "exposed":
            return [(f"exposed({g.name})", g.exposed) for g in groups]
        return [(f"hidden({g.name})", 1.0 if g.hidden is None else g.hidden) for g in groups]

    def _shown(self, value: float) -> str:
        units = _SHARES if self.group else _FIGURES[self.figure][0]
        return f"{value / units[self.unit]:.4g}{self.unit}"


def failures(asserted: tuple[Assertion, ...], known: Known) -> list[str]:
    """Describe every condition that does not hold. Raises as :meth:`Assertion.failure` does."""
    return [failure for one in asserted if (failure := one.failure(known))]
