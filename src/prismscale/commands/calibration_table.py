"""What measured steps say of modelled times, in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from prismscale.forecast.step_calibration import STEP_ERROR, StepCalibration
from prismscale.report.units import duration, percent, signed_percent

HEADS = ("run", "measured", "modelled", "", "calibrated", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedStep:
    """One measured step, as it was modelled and with both factors."""

    name: str
    measured_ns: float
    modelled_ns: float
    calibrated_ns: float

    @property
    def is_explained(self) -> bool:
        """Whether both factors bring it to what steps differ by, twice over."""
        return abs(math.log(self.calibrated_ns / self.measured_ns)) <= 2 * STEP_ERROR


def print_calibration(
    console: Console, found: StepCalibration, steps: Sequence[CalibratedStep]
) -> None:
    """Each step as it was modelled and as it is now, and both factors."""
    numbers = [Column(head, justify="right") for head in HEADS[1:]]
    table = Table(Column(HEADS[0], overflow="fold"), *numbers)
    for step in steps:
        table.add_row(*step_cells(step))
    console.print(table)
    for line in lines(found, steps):
        console.print(line, soft_wrap=True)


def step_cells(step: CalibratedStep) -> tuple[str, ...]:
    """By :data:`HEADS`."""
    modelled, calibrated = (
        signed_percent(ns / step.measured_ns - 1) for ns in (step.modelled_ns, step.calibrated_ns)
    )
    return (
        step.name,
        duration(step.measured_ns),
        duration(step.modelled_ns),
        modelled,
        duration(step.calibrated_ns),
        calibrated,
    )


def lines(found: StepCalibration, steps: Sequence[CalibratedStep]) -> list[str]:
    """What the steps say, and what they leave open."""
    known = found.calibration
    told = [
        f"kernels take {known.kernels:.3f} of what is modelled (±{percent(found.kernels_error)})",
        f"the host takes {known.host:.2f} of what is modelled (±{percent(known.host_error)})",
    ]
    if not found.tells_host:
        told[1] += ": no step tells; give one of a job that the host decides, such as a small model"
    left = [step.name for step in steps if not step.is_explained]
    if left:
        told.append(
            f"no factor explains {', '.join(left)}: another program, another cluster, or "
            "communication, which calibrate nccl-tests takes as it was measured"
        )
    return told
