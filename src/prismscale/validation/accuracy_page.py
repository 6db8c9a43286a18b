"""The accuracy page: rows of validations as a table for people, one section each.

A section lies between markers, so that each validation renews its own and leaves the others. What
misses its bar stands once more in the page's first table, worst first over all sections, with the
cause where it is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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


def section(name: str, rows: Sequence[Row], *, command: str, remarks: Sequence[str] = ()) -> str:
    """Markdown of one section, with its markers."""
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
    """Put sections on the page, each in its old place or at the end, and the misses of all on top.

    Raises:
        StorageError: the page cannot be written. UsageError: it cannot be read.
        FormatError: a marker without its other one.
    """
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else TITLE
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
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
    """The first table: of every section the rows that miss their bar, the worst first."""
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


def renew_summary(path: Path, rows: Mapping[str, Sequence[Row]]) -> None:
    """Put ten lines on a page that has the markers of :data:`SUMMARY`.

    Raises:
        StorageError: the page cannot be written. UsageError: it cannot be read, or has no markers.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    if _begin(SUMMARY) not in page or _end(SUMMARY) not in page:
        raise UsageError(f"'{path}' lacks the line {_begin(SUMMARY)} or {_end(SUMMARY)}")
    lines = [_begin(SUMMARY), "| `prismscale validate all` | bars met |", "|---|---:|"]
    worst = SUMMARY_LINES - 2 - len(rows)
    text = "\n".join([*lines, *_in_short(rows, worst), _end(SUMMARY)]) + "\n"
    write_text(path, _with(page, SUMMARY, text, path))


def _in_short(rows: Mapping[str, Sequence[Row]], worst: int) -> Iterator[str]:
    """Bars met of each part, and the worst misses of all."""
    for name, found in rows.items():
        asked = [row for row in found if row.bar is not None]
        yield f"| {name} | {sum(row.ok for row in asked)} of {len(asked)} |"
    missed = [(name, row) for name, found in rows.items() for row in found if not row.ok]
    for name, row in sorted(missed, key=lambda one: -times_the_bar(one[1]))[:worst]:
        figure = f"{_figure(row.value, row.unit)} ({row.sign} {_figure(row.bar or 0, row.unit)})"
        yield f"| missed, {name.lower()}: {_cell(row.name)} | {figure} |"
