"""The accuracy page: rows of validations as tables for people, one section per validation.

A section lies between markers, so that each validation replaces its own and leaves the others
alone. Rows that miss their bar are repeated in the page's first table, the worst of all sections
first, with the cause if it is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from prismscale.errors import FormatError, UsageError
from prismscale.files import write_text
from prismscale.validation.error_rows import times_the_bar
from prismscale.validation.rows import Row

TITLE = """# Accuracy

Every figure here is printed by a command of this package, `prismscale validate`; misses come first.
"""
MISSES = "Misses"
UNKNOWN_CAUSE = "cause not known"
SUMMARY, SUMMARY_LINES = "accuracy summary", 10
_MISSED = re.compile(
    r"^\| (.+) \| ([^|]+) \| ([^|]+) \| \*\*missed\*\* ([\d.]+) ×: ([^|]*) \|", re.M
)

_SECTION = re.compile(
    r"^## ([^\n]+)\n\n`[^`\n]+`: (\d+) of (\d+) bars met\.\n(.*?)^<!-- end", re.M | re.DOTALL
)


def section(name: str, rows: Sequence[Row], *, command: str, remarks: Sequence[str] = ()) -> str:
    """Return the Markdown of one section, with its markers."""
    missed = sum(not r.ok for r in rows)
    asked = sum(r.bar is not None for r in rows)
    others = tuple(dict.fromkeys(other for row in rows for other in row.others))
    lines = [
        _begin(name),
        f"## {name}",
        "",
        f"`{command}`: {asked - missed} of {asked} bars met.",
        "",
        "| " + " | ".join(("what", "measured", "bar", "", *others)) + " |",
        "|---|---:|---:|---|" + "---:|" * len(others),
        *(_line(row, others) for row in rows),
        "",
        *(f"- {remark}" for remark in remarks),
        _end(name),
    ]
    return "\n".join(lines) + "\n"


def renew(path: Path, sections: Mapping[str, str]) -> None:
    """Put sections on the page, each in its old place or at the end, and all misses on top.

    Raises:
        StorageError: the page cannot be written. UsageError: it cannot be read.
        FormatError: the page has only one of the two markers of a section.
    """
    page = _read(path) if path.exists() else TITLE
    if _begin(MISSES) not in page:
        page = page.replace(TITLE, f"{TITLE}\n{_begin(MISSES)}\n{_end(MISSES)}\n", 1)
    for name, text in sections.items():
        page = _with(page, name, text, path)
    page = _with(page, MISSES, _misses(page), path)
    write_text(path, page)


def _with(page: str, name: str, text: str, path: Path) -> str:
    if (_begin(name) in page) != (_end(name) in page):
        raise FormatError(f"{path}: section '{name}' has one of its two markers; restore the other")
    old = re.compile(re.escape(_begin(name)) + ".*?" + re.escape(_end(name)) + "\n?", re.DOTALL)
    if old.search(page):
        return old.sub(lambda _: text, page, count=1)
    return page.rstrip("\n") + "\n\n" + text


def _misses(page: str) -> str:
    """Return the first table: the rows of all sections that miss their bar, the worst first."""
    begin = page.find(_end(MISSES))
    found = [match.groups() for match in _MISSED.finditer(page, max(begin, 0))]
    lines = [
        f"| {what} | {measured} | {bar} | {times} × | {cause} |"
        for what, measured, bar, times, cause in sorted(found, key=lambda f: -float(f[3]))
    ]
    head = ["| what | measured | bar | of the bar | cause |", "|---|---:|---:|---:|---|"]
    told = [*head, *lines] if lines else ["No bar is missed."]
    title = [f"## {MISSES}", "", f"Missed: {len(found)}, the worst first.", ""]
    return "\n".join([_begin(MISSES), *title, *told, _end(MISSES)]) + "\n"


def _line(row: Row, others: Sequence[str]) -> str:
    bar = "" if row.bar is None else f"{row.sign} {_figure(row.bar, row.unit)}"
    said = (_figure(row.others[o], row.unit) if o in row.others else "" for o in others)
    cells = (_cell(row.name), _figure(row.value, row.unit), bar, _verdict(row), *said)
    return "| " + " | ".join(cells) + " |"


def _verdict(row: Row) -> str:
    if row.bar is None:
        return _cell(row.note)
    if row.ok:
        return "met"
    return f"**missed** {times_the_bar(row):.2f} ×: {_cell(row.note) or UNKNOWN_CAUSE}"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def _figure(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


def _begin(name: str) -> str:
    return f"<!-- begin {name} -->"


def _end(name: str) -> str:
    return f"<!-- end {name} -->"


def renew_summary(readme: Path, page: Path) -> None:
    """Put the :func:`summary` of an accuracy page between its markers on the page ``readme``.

    Raises:
        StorageError: ``readme`` cannot be written. UsageError: a page cannot be read, or the
            markers are missing.
    """
    text, whole = _read(readme), _read(page)
    if _begin(SUMMARY) not in text or _end(SUMMARY) not in text:
        raise UsageError(f"'{readme}' lacks the line {_begin(SUMMARY)} or {_end(SUMMARY)}")
    lines = "\n".join([_begin(SUMMARY), summary(whole), _end(SUMMARY)]) + "\n"
    write_text(readme, _with(text, SUMMARY, lines, readme))


def summary(page: str) -> str:
    """Return ten lines: bars met in each section of an accuracy page, and the worst misses."""
    parts, missed = [], []
    for name, met, asked, text in _SECTION.findall(page):
        parts.append(f"| {name} | {met} of {asked} |")
        for what, measured, bar, times, _ in _MISSED.findall(text):
            miss = f"| missed, {name.lower()}: {what} | {measured} ({bar}) |"
            missed.append((float(times), miss))
    missed.sort(key=lambda one: -one[0])
    lines = [*parts, *(miss for _, miss in missed)][: SUMMARY_LINES - 2]
    return "\n".join(["| `prismscale validate all` | bars met |", "|---|---:|", *lines])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
