"""The parts of ``prismscale validate``: what each is called, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prismscale.validation import collective_errors, suite
from prismscale.validation.accuracy_page import section
from prismscale.validation.causes import with_causes
from prismscale.validation.error_rows import worst_first
from prismscale.validation.kernels import kernel_scores
from prismscale.validation.rows import Row
from prismscale.validation.steps import step_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """One of them."""

    name: str
    """Of its section."""
    command: str
    """Behind ``prismscale validate``."""
    compute: Callable[[Path], Sequence[Row]]
    """Rows, from the folder of public measurements."""
    remarks: tuple[str, ...]

    @property
    def file(self) -> str:
        """Name of its rows among a bench's results."""
        return f"validate_{self.command}"

    def rows(self, truth: Path) -> list[Row]:
        """All of them, the worst first, misses with their causes.

        Raises:
            UsageError: no tables below ``truth``. FormatError: tables that are damaged.
        """
        return with_causes(worst_first(self.compute(truth)))

    def section(self, rows: Sequence[Row]) -> str:
        """On the accuracy page."""
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
    """Of distributions; ``scale``: with the time of draws of large jobs."""
    return Validation(
        name="Forecast",
        command="forecast",
        compute=lambda truth: suite.validate(truth, scale=scale),
        remarks=suite.REMARKS,
    )


def all_parts(*, scale: bool) -> tuple[Validation, ...]:
    """Of ``prismscale validate all``, in its order."""
    return KERNELS, COLLECTIVES, STEPS, forecast(scale=scale)
