"""``prismscale explore``: many layouts of one program, each of them run."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from prismscale.commands.forecast_options import Address, ExecutorName, Seed, Workers
from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleWarning, ScriptError, UsageError
from prismscale.explore.figures import Asked
from prismscale.explore.page import write_page
from prismscale.explore.points import BaseCommand, points_of
from prismscale.explore.ranking import Ranking, rank
from prismscale.explore.results import write_results
from prismscale.explore.runners import runner_named
from prismscale.explore.sweep import sweep
from prismscale.explore.sweep_folder import SweepFolder
from prismscale.explore.terminal import print_ranking
from prismscale.explore.varied import Varied, parse_all, unheard_of
from prismscale.forecast.step_spread import DRAWS
from prismscale.program_arguments import script_of
from prismscale.progress import TerminalReporter, terminal
from prismscale.run_options import (
    PROGRAM,
    job_config,
    option_arguments,
    option_parameters,
    with_options_of,
)

DEFAULT_EXPLORED = Path("runs/explored")
NOT_EXPLORED = ("out", "live", "attach", "clock", "steps", "show", "hang", "fresh")
"""Parameters of ``run`` that explore does not take: points have no live ranks."""


@with_options_of(job_config, without=NOT_EXPLORED)
def explore(
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="What differs between points: '--tp {2,4,8}', of the program or of run, or "
            "'NAME={0,1}', of the environment. Repeatable: every combination is a point.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        str,
        typer.Option(
            help="Only points for which this holds, for example 'tp*pp<=64'.", show_default="all"
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of the sweep.")] = DEFAULT_EXPLORED,
    tokens_per_step: Annotated[
        int, typer.Option(help="Of the whole job.", show_default="as found")
    ] = 0,
    draws: Annotated[int, typer.Option(help="Of the step time of each point.")] = DRAWS,
    seed: Seed = 0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run points again that failed in an earlier sweep.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run all points again, with new captures.")
    ] = False,
    **given: Any,
) -> None:
    """Run many layouts of one program and compare their steps and memory.

    Every point is what prismscale run does with the same options, and leaves the same run folder.
    A second command takes finished points as they are. Everything after the script's name belongs
    to the script.
    """
    console = terminal()
    asked = _asked(draws, seed, tokens_per_step)
    base = _base(given)
    varied = parse_all(vary or [], run_options=_own_options(), program=base.script.args)
    _remark(varied, base.script)
    points = points_of(base, varied, where)
    folder = SweepFolder(root=out)
    runner = runner_named(executor, logs=folder.logs, workers=workers, address=address)
    with folder.opened():
        with TerminalReporter(console).stage("explore") as update:
            rows = sweep(points, folder, runner, asked, again=fresh, retry=retry, progress=update)
        ranking = rank(rows)
        _write(ranking, folder, base, varied, where, asked)
    print_ranking(console, ranking, folder)
    if all(row.outcome.step_ns is None for row in rows):
        raise typer.Exit(ScriptError.exit_code)


def _asked(draws: int, seed: int, tokens_per_step: int) -> Asked:
    if draws < 1:
        raise UsageError(f"--draws is {draws}; at least 1 is needed")
    if seed < 0:
        raise UsageError(f"--seed is {seed}; allowed: 0 or more")
    if tokens_per_step < 0:
        raise UsageError(f"--tokens-per-step is {tokens_per_step}; allowed: above 0")
    return Asked(draws=draws, seed=seed, tokens_per_step=tokens_per_step)


def _own_options() -> set[str]:
    """Options of ``run`` that points may have."""
    found = option_parameters().items()
    return {name for name, p in found if p.name not in NOT_EXPLORED and name != "-m"}


def _base(given: Mapping[str, Any]) -> BaseCommand:
    parameters = option_parameters()
    script = script_of(
        given["module"],
        list(given.get(PROGRAM) or ()),
        "prismscale explore --vary '--tp {2,4}' --world-size N --",
    )
    options = ((name, tuple(tokens)) for name, tokens in option_arguments(given) if name != "-m")
    return BaseCommand(
        options=tuple(options),
        script=script,
        repeatable=frozenset(name for name, p in parameters.items() if p.multiple),
    )


def _remark(varied: Sequence[Varied], script: Script) -> None:
    """What is varied and stands nowhere in the program is perhaps misspelt."""
    for name, close in unheard_of(varied, script, _own_options()):
        warnings.warn(
            f"{name} is no option of prismscale run, and the program's own files do not mention "
            f"it; did you mean {close}? The program is given it all the same",
            PrismscaleWarning,
            stacklevel=2,
        )


def _write(
    ranking: Ranking,
    folder: SweepFolder,
    base: BaseCommand,
    varied: Sequence[Varied],
    where: str,
    asked: Asked,
) -> None:
    words = [token for _, tokens in base.options for token in tokens]
    command = shlex.join([*words, *base.program_arguments(base.script.args)])
    about = {
        "command": command,
        "vary": [one.given for one in varied],
        "where": where,
        "draws": asked.draws,
        "seed": asked.seed,
    }
    write_results(ranking, folder, about)
    write_page(ranking, folder, command)
