"""Predicted steps of real programs, as benches recorded them: ``recorded_steps.toml``, which
``scripts/generate-docs`` makes of ``bench/results``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from prismscale.analysis.step_error import ErrorBar
from prismscale.errors import FormatError
from prismscale.typed_files import decode, parse

_FILE = "recorded_steps.toml"
_NOTE = re.compile(r"(?:-([\d.]+) to \+([\d.]+) %, )?prices (\w+), prismscale ([\w-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """By what a step was predicted, as the note of a bench's row."""

    bar: ErrorBar | None
    """None where the bench did not record it."""
    prices: str
    """As :func:`~prismscale.validation.steps.price_version.price_version` has it."""
    commit: str
    """Of this project."""

    def note(self) -> str:
        """For a row."""
        bar = ""
        if self.bar is not None:
            bar = f"-{100 * self.bar.below:.1f} to +{100 * self.bar.above:.1f} %, "
        return f"{bar}prices {self.prices}, prismscale {self.commit}"

    @staticmethod
    def parse(note: str) -> Provenance | None:
        """Out of a row's note; None where it says nothing of this."""
        found = _NOTE.search(note)
        if found is None:
            return None
        below, above, prices, commit = found.groups()
        bar = None
        if below and above:
            bar = ErrorBar(below=float(below) / 100, above=float(above) / 100)
        return Provenance(bar=bar, prices=prices, commit=commit)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One run's."""

    family: str
    """``simumax``, ``torchtitan`` or ``vtrain``."""
    case: str
    """As its public row is named."""
    step_ms: float
    median_ms: float = 0.0
    """Of the run's forecast, with the variation of the cluster's profile; 0 where none was made."""
    bar: ErrorBar | None = None
    """The step's error bar; None where the bench did not record it."""
    prices: str = ""
    """Empty where the bench did not record them."""
    commit: str = ""
    """Of this project; empty where the bench did not record it."""

    def __post_init__(self) -> None:
        if self.step_ms <= 0:
            raise FormatError(f"step of {self.case} is {self.step_ms} ms; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    step: tuple[RecordedStep, ...]


@cache
def recorded_steps() -> tuple[RecordedStep, ...]:
    """All of them."""
    text = resources.files("prismscale.validation.steps").joinpath(_FILE).read_text("utf-8")
    return decode(_Recorded, parse(text, _FILE), _FILE).step
