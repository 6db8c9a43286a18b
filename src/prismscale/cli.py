"""The command line: ``prismscale COMMAND``. Each command lives in :mod:`prismscale.commands`."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from prismscale import __version__
from prismscale.commands import run as run_command
from prismscale.commands.calibrate import calibrate
from prismscale.commands.imports import imports
from prismscale.errors import PrismscaleError, ScriptError, UsageError

INTERRUPTED = 130
TERMINATED = 143

app = typer.Typer(
    name="prismscale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Run any rank of an 8,192-GPU training job on the machine you have.",
)
app.command(
    "run",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(run_command.run)
app.add_typer(calibrate, name="calibrate")
app.add_typer(imports, name="import")


class Terminated(BaseException):
    """SIGTERM, unwinding so that children end with us."""


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
    """Ctrl-C or SIGTERM, once: a second one must not interrupt the ending of children."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def main() -> None:
    """Entry point: errors become one screen and an exit code (see :mod:`prismscale.errors`)."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, _unwind)
    screen = Console(stderr=True, highlight=False)
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        screen.print("\nInterrupted; everything that was started has been ended.")
        sys.exit(INTERRUPTED)
    except Terminated:
        screen.print("\nTerminated; everything that was started has been ended.")
        sys.exit(TERMINATED)
    except PrismscaleError as error:
        _show(screen, error)
        sys.exit(error.exit_code)
    except typer.TyperException as error:
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


if __name__ == "__main__":
    main()
