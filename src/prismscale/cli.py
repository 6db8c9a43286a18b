"""The command line: ``prismscale COMMAND``. Each command lives in :mod:`prismscale.commands`."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from prismscale import __version__
from prismscale.commands import forecast, layouts
from prismscale.commands import run as run_command
from prismscale.commands.calibrate import calibrate
from prismscale.commands.doctor import doctor
from prismscale.commands.exports import exports
from prismscale.commands.health import health
from prismscale.commands.imports import imports
from prismscale.commands.profile_kernels import profile_kernels
from prismscale.commands.program_arguments import OPEN, ProgramCommand
from prismscale.commands.validations import validations
from prismscale.errors import PrismscaleError, PrismscaleWarning, ScriptError, UsageError

SIGNALS = (signal.SIGINT, signal.SIGTERM)

app = typer.Typer(
    name="prismscale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Run any rank of an 8,192-GPU training job on the machine you have.",
)
app.command("run", cls=ProgramCommand, context_settings=OPEN)(run_command.run)
app.add_typer(calibrate, name="calibrate")
app.add_typer(imports, name="import")
app.add_typer(exports, name="export")
for command in (
    forecast.forecast,
    forecast.sensitivity,
    layouts.place,
    layouts.explore,
    health,
    doctor,
):
    app.command()(command)
app.command("profile-kernels")(profile_kernels)
app.add_typer(validations, name="validate")


class Unwound(BaseException):
    """Ctrl-C or SIGTERM, on its way up so that everything that was started ends with us."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.what = "Interrupted" if number == signal.SIGINT else "Terminated"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prismscale {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


def _unwind(number: int, frame: FrameType | None) -> None:
    """Once: a second signal must not interrupt the ending of children."""
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    raise Unwound(number)


def main() -> None:
    """Entry point: errors become one screen and an exit code (see :mod:`prismscale.errors`)."""
    for name in SIGNALS:
        signal.signal(name, _unwind)
    screen = Console(stderr=True, highlight=False)
    warnings.showwarning = partial(_show_warning, screen, warnings.showwarning)
    try:
        # A command's typer.Exit comes back as its code; a command that just ends, as None.
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except Unwound as signalled:
        screen.print(f"\n{signalled.what}; everything that was started has been ended.")
        sys.exit(signalled.exit_code)
    except PrismscaleError as error:
        _show(screen, error)
        sys.exit(error.exit_code)
    except typer.TyperException as error:
        # Without a message it was a command without arguments, answered by its help.
        if error.format_message():
            _show(screen, UsageError(_usage(error)))
        sys.exit(UsageError.exit_code)


def _usage(error: typer.TyperException) -> str:
    """An option or command that the parser refused, and where the allowed ones are listed."""
    context = getattr(error, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    return error.format_message().rstrip(".") + where


def _show(screen: Console, error: PrismscaleError) -> None:
    if isinstance(error, ScriptError) and error.traceback:
        screen.print(error.traceback.rstrip(), markup=False, soft_wrap=True)
    screen.print("[bold red]error:[/] ", end="")
    screen.print(str(error), markup=False, soft_wrap=True)


def _show_warning(
    screen: Console, others: Callable[..., None], message: Warning | str, *where: Any
) -> None:
    """Ours as a sentence, without the line of code that gave it."""
    if isinstance(message, PrismscaleWarning):
        screen.print(f"[yellow]note:[/] {message}", soft_wrap=True)
    else:
        others(message, *where)


if __name__ == "__main__":
    main()
