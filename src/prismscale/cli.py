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
from rich.text import Text
from typer.core import TyperGroup

from prismscale import __version__
from prismscale.errors import PrismscaleError, PrismscaleWarning, ScriptError, UsageError
from prismscale.progress import terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _run() -> typer.Typer:
    from prismscale.commands import run
    from prismscale.program_arguments import OPEN, ProgramCommand

    command = typer.Typer(add_completion=False)
    command.command(cls=ProgramCommand, context_settings=OPEN)(run.run)
    return command


def _fit() -> typer.Typer:
    from prismscale.commands.verdicts import fit
    from prismscale.program_arguments import OPEN, ProgramCommand

    command = typer.Typer(add_completion=False)
    command.command(cls=ProgramCommand, context_settings=OPEN)(fit.fit)
    return command


def _forecast() -> Callable[..., None]:
    from prismscale.commands.forecast import forecast

    return forecast


def _what_if() -> Callable[..., None]:
    from prismscale.commands.what_if.what_if_command import what_if

    return what_if


def _sensitivity() -> Callable[..., None]:
    from prismscale.commands.forecast import sensitivity

    return sensitivity


def _place() -> Callable[..., None]:
    from prismscale.commands.place import place

    return place


def _studies() -> typer.Typer:
    from prismscale.commands.study.study_prism import studies

    return studies


def _explore() -> typer.Typer:
    from prismscale.commands.explore import explore
    from prismscale.program_arguments import OPEN, ProgramCommand

    command = typer.Typer(add_completion=False)
    command.command(cls=ProgramCommand, context_settings=OPEN)(explore)
    return command


def _compare() -> Callable[..., None]:
    from prismscale.commands.compare.compare_command import compare_runs

    return compare_runs


def _diagnose() -> Callable[..., None]:
    from prismscale.commands.diagnose import diagnose_dumps

    return diagnose_dumps


def _check_devices() -> typer.Typer:
    from prismscale.commands.verdicts import check_devices
    from prismscale.program_arguments import OPEN, ProgramCommand

    command = typer.Typer(add_completion=False)
    command.command(cls=ProgramCommand, context_settings=OPEN)(check_devices.check_devices)
    return command


def _health() -> Callable[..., None]:
    from prismscale.commands.health import health

    return health


def _doctor() -> Callable[..., None]:
    from prismscale.commands.doctor import doctor

    return doctor


def _profile_kernels() -> Callable[..., None]:
    from prismscale.commands.profile_kernels import profile_kernels

    return profile_kernels


def _calibrate() -> typer.Typer:
    from prismscale.commands.calibrate import calibrate

    return calibrate


def _imports() -> typer.Typer:
    from prismscale.commands.imports import imports

    return imports


def _exports() -> typer.Typer:
    from prismscale.commands.exports import exports

    return exports


def _validations() -> typer.Typer:
    from prismscale.commands.validations import validations

    return validations


COMMANDS: dict[str, Callable[[], typer.Typer | Callable[..., None]]] = {
    "run": _run,
    "fit": _fit,
    "forecast": _forecast,
    "what-if": _what_if,
    "sensitivity": _sensitivity,
    "place": _place,
    "study": _studies,
    "explore": _explore,
    "compare": _compare,
    "diagnose": _diagnose,
    "health": _health,
    "check-devices": _check_devices,
    "doctor": _doctor,
    "profile-kernels": _profile_kernels,
    "calibrate": _calibrate,
    "import": _imports,
    "export": _exports,
    "validate": _validations,
}
"""Loaders by command name. Each one imports its command on demand: all together take a second."""


def all_commands() -> dict[str, Any]:
    """Import every command and return them by name."""
    return {name: _loaded(name) for name in COMMANDS}


def _loaded(name: str) -> Any:
    found = COMMANDS[name]()
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command()(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


class Commands(TyperGroup):
    """The group of all commands, each of which is imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the command names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None if there is none."""
        return _loaded(cmd_name) if cmd_name in COMMANDS else None


app = typer.Typer(
    name="prismscale",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Run any rank of an 8,192-GPU training job on the machine you have.",
)


class Unwound(BaseException):
    """Raised by Ctrl-C or SIGTERM, so that contexts on the stack end everything they started."""

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
    """Raise :class:`Unwound`, once: a second signal must not interrupt the ending of children."""
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    raise Unwound(number)


def main() -> None:
    """Entry point: errors become one screen and an exit code (see :mod:`prismscale.errors`)."""
    for name in SIGNALS:
        signal.signal(name, _unwind)
    screen = terminal(stderr=True)
    warnings.showwarning = partial(_show_warning, screen, warnings.showwarning)
    try:
        # The result is the code of a typer.Exit, or None if the command simply returned.
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except Unwound as signalled:
        screen.print(f"\n{signalled.what}; everything that was started has been ended.")
        sys.exit(signalled.exit_code)
    except PrismscaleError as error:
        _show(screen, error)
        sys.exit(error.exit_code)
    except typer.TyperException as error:
        # Without a message this was a command without arguments, whose help was printed.
        if error.format_message():
            _show(screen, UsageError(_usage(error)))
        sys.exit(UsageError.exit_code)


def _usage(error: typer.TyperException) -> str:
    """Return why the parser refused an option or command, and where the allowed ones are listed."""
    context = getattr(error, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    return error.format_message().rstrip(".") + where


def _show(screen: Console, error: PrismscaleError) -> None:
    if isinstance(error, ScriptError) and error.traceback:
        screen.print(error.traceback.rstrip(), markup=False, soft_wrap=True)
    screen.print("error: ", end="", style="bold red")
    screen.print(str(error), markup=False, soft_wrap=True)


def _show_warning(
    screen: Console, others: Callable[..., None], message: Warning | str, *where: Any
) -> None:
    """Print a warning of prismscale as a sentence, without the line of code that raised it."""
    if isinstance(message, PrismscaleWarning):
        screen.print(Text.assemble(("note:", "yellow"), f" {message}"), soft_wrap=True)
    else:
        others(message, *where)


if __name__ == "__main__":
    main()
