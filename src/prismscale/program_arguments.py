"""Parses the user's program on prismscale's command line, written as for python or torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from prismscale.cluster import Cluster
from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleError, UsageError
from prismscale.torchrun_options import translated

OPEN = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Settings of a command whose options end where the program begins."""

USUAL_CLUSTER = "h100-sxm"
"""The target cluster of a job that names none."""

ProgramArgument = Annotated[
    list[str] | None,
    typer.Argument(help="The script (or module, with -m) and its arguments.", show_default=False),
]
ModuleOption = Annotated[
    str,
    typer.Option(
        "-m",
        help="Run a module instead of a script; what follows are its arguments.",
        show_default=False,
    ),
]


class ProgramCommand(TyperCommand):
    """A command that ends with a program.

    After ``-m MODULE`` all arguments belong to the module, as in ``python -m``. Without this class,
    click would take the module's options for prismscale's own.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate torchrun's options and add ``--`` after the module's name, then parse."""
        args = self._translated(args)
        stop = self._module_end(args)
        if stop is not None and args[stop : stop + 1] != ["--"]:
            args = [*args[:stop], "--", *args[stop:]]
        return super().parse_args(ctx, args)

    def _translated(self, args: Sequence[str]) -> list[str]:
        """Translate torchrun's options, but only for commands that have a world size."""
        ours = {
            name: not (getattr(option, "is_flag", False) or getattr(option, "count", False))
            for option in self.params
            for name in option.opts
            if name.startswith("-")
        }
        if "--world-size" not in ours:
            return list(args)
        return translated(args, ours | {"--help": False}, self._gpus_per_node(args))

    @staticmethod
    def _gpus_per_node(args: Sequence[str]) -> int:
        """Return the GPUs per node of the named cluster, or of the usual one.

        The usual one also replaces a cluster that cannot be loaded: its error is raised at its use.
        """
        pairs = [(a.partition("=")[0], a.partition("=")[2]) for a in args]
        named = [
            value or args[i + 1]
            for i, (name, value) in enumerate(pairs[:-1])
            if name == "--cluster"
        ]
        try:
            return Cluster.load(named[0] if named else USUAL_CLUSTER).devices_per_node
        except PrismscaleError:
            return Cluster.load(USUAL_CLUSTER).devices_per_node

    def _module_end(self, args: Sequence[str]) -> int | None:
        """Return where the arguments of ``-m MODULE`` begin; None if there is no ``-m``."""
        with_value = {
            name
            for option in self.params
            if not (getattr(option, "is_flag", False) or getattr(option, "count", False))
            for name in option.opts
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            is_module = args[place].startswith("-m") and not args[place].startswith("--")
            place += 2 if args[place] in with_value else 1
            if is_module:
                return place
        return None


def script_of(module: str, program: list[str], command: str) -> Script:
    """Return the user's program: ``module``, or the first word of ``program``.

    The other words are its arguments.

    Raises:
        UsageError: there is no program; the message says how ``command`` takes one.
    """
    if module:
        return Script(target=module, args=tuple(program), is_module=True)
    if not program:
        raise UsageError(f"no script given: {command} script.py [arguments]")
    return Script(target=program[0], args=tuple(program[1:]))
