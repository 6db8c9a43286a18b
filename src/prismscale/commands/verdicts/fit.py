"""``prismscale fit``: the shortest way to "does it fit"."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismscale.analysis.assertions import OF_MEMORY, Assertion, Known, failures
from prismscale.analysis.fit_result import FitResult
from prismscale.commands.verdicts.answer_options import (
    JsonPath,
    MarkdownPath,
    as_json,
    emit,
    is_alone,
)
from prismscale.errors import NoFitError, UnmetError
from prismscale.fit.fit_job import FitJob
from prismscale.fit.variants import Change
from prismscale.progress import TerminalReporter, terminal
from prismscale.report.fit_text import fit_markdown, print_fit
from prismscale.report.units import size
from prismscale.run_options import job_config, with_options_of
from prismscale.runfolder import RunFolder

DEFAULT_OUT = Path("runs/fit")
OTHERS = (
    *("live", "attach", "clock", "steps", "samples", "watch_steps", "show", "slow", "what_if"),
    *("hang", "compute_scale", "variability", "values", "slots", "no_memory", "device", "out"),
    *("max_captures", "storage", "check", "quick", "record", "record_limit", "transfers"),
    *("netns", "budget"),
)
"""Options of ``run`` that change nothing of the memory, or that ``fit`` decides."""


@with_options_of(job_config, without=OTHERS)
def fit(
    tried: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="Also with these options of the program, and NAME=VALUE before them: "
            "'--tp 8', 'PYTORCH_ALLOC_CONF=expandable_segments:True'; repeatable.",
            show_default=False,
        ),
    ] = None,
    asserted: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            help=f"Fail unless it holds, for CI: reserved<76GiB; of {', '.join(OF_MEMORY)}; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    json: JsonPath = "",
    markdown: MarkdownPath = "",
    out: Annotated[Path, typer.Option(help="Folder; captures in it are used again.")] = DEFAULT_OUT,
    **given: Any,
) -> None:
    """Say whether a training job fits into the GPU's memory, and what holds it.

    One rank of each kind of pipeline stage runs on a GPU that is not there. Exit code 0: it fits;
    4: it does not. torchrun's own options may stand before the script.
    """
    assertions = tuple(Assertion.parse(text, among=OF_MEMORY) for text in asserted or ())
    changes = tuple(Change.parse(text) for text in tried or ())
    alone = is_alone(json, markdown)
    console = terminal(stderr=alone)
    config = job_config(**given, device="null", out=out)
    config.load_cluster()
    with RunFolder(root=config.out).opened(fresh=config.fresh) as folder:
        job = FitJob(
            config=config, changes=changes, folder=folder, reporter=TerminalReporter(console)
        )
        result = job.run()
    if not alone:
        print_fit(result, console)
    verdict = result.given.fit(result.capacity_bytes)
    unmet = failures(assertions, Known(fit=verdict))
    emit(as_json(result.to_json() | {"unmet": unmet}), json)
    emit(fit_markdown(result, unmet), markdown)
    _end(result, unmet)


def _end(result: FitResult, unmet: list[str]) -> None:
    verdict = result.given.fit(result.capacity_bytes)
    if verdict is not None and not verdict.fits:
        held, has = size(verdict.held_bytes), size(verdict.capacity_bytes)
        ended = "ran out of memory and " if verdict.ran_out else ""
        raise NoFitError(f"the job does not fit: rank {verdict.rank} {ended}holds {held} of {has}")
    if unmet:
        raise UnmetError("\n".join(["what was asserted does not hold:", *unmet]))
