"""``prismscale validate``: results against measurements, public ones or the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismscale.commands.validate_gpu import validate_gpu
from prismscale.program_arguments import OPEN, ProgramCommand
from prismscale.validation import collective_errors
from prismscale.validation.accuracy_page import renew, section
from prismscale.validation.rows import finish
from prismscale.validation.suite import REMARKS, validate

validations = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Hold results against measurements."
)


@validations.command("forecast")
def validate_forecast(
    truth: Annotated[Path, typer.Option(help="Folder of public measurements.")],
    scale: Annotated[
        bool, typer.Option(help="Time draws of 1,024 to 65,536 ranks too (minutes).")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="JSON file of the rows.")] = None,
    page: Annotated[Path | None, typer.Option(help="Accuracy page to renew.")] = Path(
        "docs/accuracy.md"
    ),
) -> None:
    """Hold forecasts against public measurements; misses are shown, and exit with 1."""
    rows = validate(truth, scale=scale)
    code = finish(rows, title="Forecasts against public measurements", json_path=json)
    if page is not None:
        command = "prismscale validate forecast"
        renew(page, "Forecast", section("Forecast", rows, command=command, remarks=REMARKS))
    if code:
        raise typer.Exit(code)


@validations.command("collectives")
def validate_collectives(
    truth: Annotated[Path, typer.Option(help="Folder of public measurements.")],
    json: Annotated[Path | None, typer.Option(help="JSON file of the rows.")] = None,
    page: Annotated[Path | None, typer.Option(help="Accuracy page to renew.")] = Path(
        "docs/accuracy.md"
    ),
) -> None:
    """Hold modelled collectives against public measurements of NCCL that none was fitted to."""
    rows = collective_errors.validate(truth)
    code = finish(rows, title="Collectives against public measurements", json_path=json)
    if page is not None:
        name, command = "Communication", "prismscale validate collectives"
        renew(page, name, section(name, rows, command=command, remarks=collective_errors.REMARKS))
    if code:
        raise typer.Exit(code)


validations.command("gpu", cls=ProgramCommand, context_settings=OPEN)(validate_gpu)
