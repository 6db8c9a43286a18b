"""``prismscale run``: capture, simulate, run live, report."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from prismscale.analysis.answers import Answers, answers
from prismscale.analysis.assertions import Known, failures
from prismscale.analysis.result import RunResult
from prismscale.api import perform
from prismscale.commands.verdicts.answer_options import (
    Asserted,
    ForSteps,
    JsonPath,
    MarkdownPath,
    PriceOption,
    TokensPerStep,
    Verdicts,
    answers_json,
    as_json,
    emit,
)
from prismscale.config import JobConfig
from prismscale.errors import StuckError, UnmetError, UsageError
from prismscale.forecast.draws.executor import LocalProcesses
from prismscale.progress import TerminalReporter, terminal
from prismscale.report.markdown import answers_markdown
from prismscale.report.text import print_summary
from prismscale.run_options import job_config, with_options_of
from prismscale.runfolder import RunFolder

MOST_HANGS = 24
"""Lines of a hang's explanation on the terminal."""


@with_options_of(job_config)
def run(
    price: PriceOption = "",
    for_steps: ForSteps = 1000,
    tokens_per_step: TokensPerStep = 0,
    asserted: Asserted = None,
    json: JsonPath = "",
    markdown: MarkdownPath = "",
    **given: Any,
) -> None:
    """Run any rank of a training job of any world size on this machine.

    Everything after the script's (or module's) name belongs to it.
    """
    verdicts = Verdicts.of(price, for_steps, tokens_per_step, asserted, json, markdown)
    console = terminal(stderr=verdicts.owns_output)
    config = job_config(**given)
    result = perform(
        config,
        reporter=TerminalReporter(console),
        log_line=lambda rank, line: console.print(Text(f"[rank {rank}] ") + Text.from_ansi(line)),
        executor=LocalProcesses(),
        wanted=verdicts.asked,
    )
    folder = RunFolder(root=config.out)
    if not verdicts.owns_output:
        print_summary(result, console, folder)
    found = None if result.hung else answers(result)
    # Told before an assertion is refused: what a run found is not lost for a name that is wrong.
    try:
        unmet = failures(verdicts.asserted, Known(fit=found.fit, answers=found)) if found else []
    except UsageError:
        _tell(result, found, [], verdicts)
        raise
    _tell(result, found, unmet, verdicts)
    if found is None:
        raise StuckError(_hang_text(config, result, folder))
    if unmet:
        raise UnmetError("\n".join(["what was asserted does not hold:", *unmet]))


def _tell(result: RunResult, found: Answers | None, unmet: list[str], verdicts: Verdicts) -> None:
    told = None if found is None else answers_json(found) | {"unmet": unmet}
    emit(as_json(result.to_json() | {"answers": told}), verdicts.json)
    emit(answers_markdown(result, found, unmet), verdicts.markdown)


def _hang_text(config: JobConfig, result: RunResult, folder: RunFolder) -> str:
    """Who hangs, and every group that waits, causes first."""
    told = ", ".join(f"rank {r} never begins step {s}" for r, s in sorted(config.hang.items()))
    shown = "\n  ".join(result.hangs[:MOST_HANGS])
    left = len(result.hangs) - MOST_HANGS
    more = f"\n  … and {left:,} more, all of them in {folder.results}" if left > 0 else ""
    groups = f"{len(result.hangs):,} groups wait" if len(result.hangs) > 1 else "one group waits"
    who = f"{groups} for ever:\n  {shown}{more}" if result.hangs else "no group waits for it"
    found = result.standstill
    why = f"\n{found.text}\nWhat each rank called last: {found.folder}" if found else ""
    return f"the job hangs: {told}, and {who}{why}"
