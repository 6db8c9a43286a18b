"""The parts of ``prismscale validate``: the name of each, and the function that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prismscale.validation import suite
from prismscale.validation.accuracy_page import section
from prismscale.validation.causes import with_causes
from prismscale.validation.communication import collective_errors
from prismscale.validation.error_rows import worst_first
from prismscale.validation.kernels import kernel_scores
from prismscale.validation.rows import Row
from prismscale.validation.steps import step_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """One part of ``prismscale validate``."""

    name: str
    """Title of its section."""
    command: str
    """Its name after ``prismscale validate``."""
    compute: Callable[[Path], Sequence[Row]]
    """Computes its rows from the folder of public measurements."""
    remarks: tuple[str, ...]

    @property
    def file(self) -> str:
        """Name of the file of its rows among the results of benches."""
        return f"validate_{self.command}"

    def rows(self, truth: Path) -> list[Row]:
        """Return all rows, the worst first, misses with their causes.

        Raises:
            UsageError: there are no tables below ``truth``. FormatError: tables are damaged.
        """
        return with_causes(worst_first(self.compute(truth)))

    def section(self, rows: Sequence[Row]) -> str:
        """Return the section of the accuracy page for ``rows``."""
        command = f"prismscale validate {self.command}"
        return section(self.name, rows, command=command, remarks=self.remarks)


KERNELS = Validation(
    name="Kernels",
    command="kernels",
    compute=kernel_scores.validate,
    remarks=kernel_scores.REMARKS,
)
COLLECTIVES = Validation(
    name="Communication",
    command="collectives",
    compute=collective_errors.validate,
    remarks=collective_errors.REMARKS,
)
STEPS = Validation(
    name="Whole steps",
    command="steps",
    compute=step_scores.validate,
    remarks=step_scores.REMARKS,
)


def forecast(*, scale: bool) -> Validation:
    """Return the validation of forecasts; ``scale``: also time the draws of large jobs."""
    return Validation(
        name="Forecast",
        command="forecast",
        compute=lambda truth: suite.validate(truth, scale=scale),
        remarks=suite.REMARKS,
    )


def all_parts(*, scale: bool) -> tuple[Validation, ...]:
    """Return all parts of ``prismscale validate all``, in order."""
    return KERNELS, COLLECTIVES, STEPS, forecast(scale=scale)
