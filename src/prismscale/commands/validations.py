"""``prismscale validate``: results against measurements, public ones or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prismscale.commands.validate_gpu import validate_gpu
from prismscale.program_arguments import OPEN, ProgramCommand
from prismscale.validation import parts
from prismscale.validation.accuracy_page import renew, renew_summary
from prismscale.validation.rows import finish, write_rows

validations = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Hold results against measurements."
)


TruthOption = Annotated[Path, typer.Option(help="Folder of public measurements.")]
JsonOption = Annotated[Path | None, typer.Option(help="JSON file of the rows.")]
PageOption = Annotated[Path | None, typer.Option(help="Accuracy page to renew.")]
ScaleOption = Annotated[
    bool, typer.Option(help="Time draws of 1,024 to 65,536 ranks too (minutes).")
]
PAGE = Path("docs/accuracy.md")


@validations.command("all")
def validate_all(
    truth: TruthOption,
    scale: ScaleOption = True,
    json: Annotated[Path | None, typer.Option(help="Folder of a JSON file of each part.")] = None,
    page: PageOption = PAGE,
    readme: Annotated[
        Path | None, typer.Option(help="Page that has a summary of the accuracy page.")
    ] = None,
) -> None:
    """Hold kernels, collectives, whole steps and forecasts against public measurements.

    Each part has a command of its own, too. Misses are shown, and exit with 1.
    """
    _told(parts.all_parts(scale=scale), truth, json, page, readme)


@validations.command("kernels")
def validate_kernels(truth: TruthOption, json: JsonOption = None, page: PageOption = PAGE) -> None:
    """Hold the kernel model against public measurements that it was not fitted on.

    The worst come first; misses are shown, and exit with 1.
    """
    _told([parts.KERNELS], truth, json, page)


@validations.command("collectives")
def validate_collectives(
    truth: TruthOption, json: JsonOption = None, page: PageOption = PAGE
) -> None:
    """Hold modelled collectives against public measurements of NCCL that none was fitted to."""
    _told([parts.COLLECTIVES], truth, json, page)


@validations.command("steps")
def validate_steps(truth: TruthOption, json: JsonOption = None, page: PageOption = PAGE) -> None:
    """Hold whole training steps of real programs against public measurements.

    Predicted steps are those that benches recorded, because the programs run for hours.
    """
    _told([parts.STEPS], truth, json, page)


@validations.command("forecast")
def validate_forecast(
    truth: TruthOption, scale: ScaleOption = True, json: JsonOption = None, page: PageOption = PAGE
) -> None:
    """Hold forecasts against public measurements; misses are shown, and exit with 1."""
    _told([parts.forecast(scale=scale)], truth, json, page)


def _told(
    chosen: Sequence[parts.Validation],
    truth: Path,
    json: Path | None,
    page: Path | None,
    readme: Path | None = None,
) -> None:
    """Print rows, write them, renew their sections; exit with 1 where a bar is missed."""
    code = 0
    rows = {}
    for part in chosen:
        rows[part.name] = found = part.rows(truth)
        code |= finish(found, title=f"{part.name} against public measurements")
        if json is not None:
            write_rows(found, json if len(chosen) == 1 else json / f"{part.file}.json")
    if page is not None:
        renew(page, {part.name: part.section(rows[part.name]) for part in chosen})
        if readme is not None:
            renew_summary(readme, page)
    if code:
        raise typer.Exit(code)


validations.command("gpu", cls=ProgramCommand, context_settings=OPEN)(validate_gpu)
