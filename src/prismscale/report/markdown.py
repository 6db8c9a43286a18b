"""A run's answers as Markdown, for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.analysis.answers import Answers
from prismscale.analysis.result import RunResult
from prismscale.report.answer_rows import AnswerRow, answer_rows
from prismscale.report.remarks import warnings_of
from prismscale.report.units import counted

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#&"})


def answers_markdown(result: RunResult, found: Answers | None, unmet: Sequence[str] = ()) -> str:
    """Return a heading, the assertions that do not hold, the table of answers, and the warnings."""
    where = f"{counted(result.world_size, 'rank')} on {result.cluster}"
    if found is None:
        lines = [f"### Hangs: {escaped(where)}", "", f"`{_code(result.command)}`", ""]
    else:
        lines = [*heading(where, result.command, found.fit is None or found.fit.fits, unmet)]
        lines += table(answer_rows(result, found))
    lines += [f"- {escaped(warning)}" for warning in warnings_of(result)]
    return "\n".join(lines).rstrip() + "\n"


def heading(where: str, command: str, fits: bool, unmet: Sequence[str]) -> list[str]:
    """Return the lines of the verdict, the command, and the assertions that do not hold."""
    verdict = "does not fit" if not fits else "assertions do not hold" if unmet else "ok"
    lines = [f"### {escaped(where)}: {verdict}", "", f"`{_code(command)}`", ""]
    return [*lines, *(f"- **{escaped(text)}**" for text in unmet), *([""] if unmet else [])]


def table(rows: Sequence[AnswerRow]) -> list[str]:
    """Return the lines of a table of questions and answers."""
    cells = (f"| {escaped(r.name)} | **{escaped(r.answer)}** | {escaped(r.detail)} |" for r in rows)
    return ["| | | |", "|---|---|---|", *cells, ""]


def escaped(text: str) -> str:
    """Escape ``text`` so that Markdown shows it literally, on one line."""
    return " ".join(text.split()).translate(_SPECIAL)


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())
