"""``prismscale validate``: results against measurements, public ones or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prismscale.commands.validate_gpu import validate_gpu
from prismscale.program_arguments import OPEN, ProgramCommand
from prismscale.validation import collective_errors
from prismscale.validation.accuracy_page import renew, section
from prismscale.validation.kernels import kernel_scores
from prismscale.validation.rows import Row, finish
from prismscale.validation.suite import REMARKS, validate

validations = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Hold results against measurements."
)


TruthOption = Annotated[Path, typer.Option(help="Folder of public measurements.")]
JsonOption = Annotated[Path | None, typer.Option(help="JSON file of the rows.")]
PageOption = Annotated[Path | None, typer.Option(help="Accuracy page to renew.")]
PAGE = Path("docs/accuracy.md")


@validations.command("forecast")
def validate_forecast(
    truth: TruthOption,
    scale: Annotated[
        bool, typer.Option(help="Time draws of 1,024 to 65,536 ranks too (minutes).")
    ] = True,
    json: JsonOption = None,
    page: PageOption = PAGE,
) -> None:
    """Hold forecasts against public measurements; misses are shown, and exit with 1."""
    _told("Forecast", "forecast", validate(truth, scale=scale), REMARKS, json, page)


@validations.command("collectives")
def validate_collectives(
    truth: TruthOption, json: JsonOption = None, page: PageOption = PAGE
) -> None:
    """Hold modelled collectives against public measurements of NCCL that none was fitted to."""
    rows = collective_errors.validate(truth)
    _told("Communication", "collectives", rows, collective_errors.REMARKS, json, page)


@validations.command("kernels")
def validate_kernels(truth: TruthOption, json: JsonOption = None, page: PageOption = PAGE) -> None:
    """Hold the kernel model against public measurements that it was not fitted on.

    The worst come first; misses are shown, and exit with 1.
    """
    _told("Kernels", "kernels", kernel_scores.validate(truth), kernel_scores.REMARKS, json, page)


def _told(
    name: str,
    command: str,
    rows: Sequence[Row],
    remarks: Sequence[str],
    json: Path | None,
    page: Path | None,
) -> None:
    """Print rows, write them, renew their section; exit with 1 where a bar is missed."""
    code = finish(rows, title=f"{name} against public measurements", json_path=json)
    if page is not None:
        text = section(name, rows, command=f"prismscale validate {command}", remarks=remarks)
        renew(page, name, text)
    if code:
        raise typer.Exit(code)


validations.command("gpu", cls=ProgramCommand, context_settings=OPEN)(validate_gpu)
