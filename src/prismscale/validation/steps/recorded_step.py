"""Predicted steps of real programs, as recorded by benches in ``recorded_steps.toml``.

``scripts/generate-docs`` makes this file from ``bench/results``."""

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
    """Error bar, prices and commit of a predicted step, as in the note of a bench's row."""

    bar: ErrorBar | None
    """Error bar of the step; None if the bench did not record it."""
    prices: str
    """Result of :func:`~prismscale.validation.steps.price_version.price_version`."""
    commit: str
    """Commit of this project."""

    def note(self) -> str:
        """Return the note of a row."""
        bar = ""
        if self.bar is not None:
            bar = f"-{100 * self.bar.below:.1f} to +{100 * self.bar.above:.1f} %, "
        return f"{bar}prices {self.prices}, prismscale {self.commit}"

    @staticmethod
    def parse(note: str) -> Provenance | None:
        """Parse a row's note; None if the note holds no provenance."""
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
    """The predicted step of one run."""

    family: str
    """``simumax``, ``torchtitan``, ``vtrain`` or ``bridge``."""
    case: str
    """Name of the public row."""
    step_ms: float
    median_ms: float = 0.0
    """Median of the run's forecast, with the variation of the cluster's profile; 0 without one."""
    bar: ErrorBar | None = None
    """Error bar of the step; None if the bench did not record it."""
    prices: str = ""
    """Version of the prices; empty if the bench did not record it."""
    commit: str = ""
    """Commit of this project; empty if the bench did not record it."""

    def __post_init__(self) -> None:
        if self.step_ms <= 0:
            raise FormatError(f"step of {self.case} is {self.step_ms} ms; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    step: tuple[RecordedStep, ...]


@cache
def recorded_steps() -> tuple[RecordedStep, ...]:
    """Load all recorded steps."""
    text = resources.files("prismscale.validation.steps").joinpath(_FILE).read_text("utf-8")
    return decode(_Recorded, parse(text, _FILE), _FILE).step
