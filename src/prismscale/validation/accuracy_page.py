"""The accuracy page: rows of validations as a table for people, one section each.

A section lies between markers, so that each validation renews its own and leaves the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from prismscale.errors import FormatError, UsageError
from prismscale.files import write_text
from prismscale.validation.rows import Row

TITLE = """# Accuracy

Every figure here is printed by a command of this package; misses are shown.
"""


def section(name: str, rows: Sequence[Row], *, command: str, remarks: Sequence[str] = ()) -> str:
    """Markdown of one section, with its markers."""
    missed = sum(not r.ok for r in rows)
    asked = sum(r.bar is not None for r in rows)
    lines = [
        _begin(name),
        f"## {name}",
        "",
        f"`{command}`: {asked - missed} of {asked} bars met.",
        "",
        "| what | measured | bar | |",
        "|---|---:|---:|---|",
        *(_line(row) for row in rows),
        "",
        *(f"- {remark}" for remark in remarks),
        _end(name),
    ]
    return "\n".join(lines) + "\n"


def renew(path: Path, name: str, text: str) -> None:
    """Put a section on the page: in its old place, or at the end.

    Raises:
        StorageError: the page cannot be written. UsageError: it cannot be read.
        FormatError: a marker without its other one.
    """
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else TITLE
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    if (_begin(name) in page) != (_end(name) in page):
        raise FormatError(f"{path}: section '{name}' has one of its two markers; restore the other")
    old = re.compile(re.escape(_begin(name)) + ".*?" + re.escape(_end(name)) + "\n?", re.DOTALL)
    if old.search(page):
        page = old.sub(lambda _: text, page, count=1)
    else:
        page = page.rstrip("\n") + "\n\n" + text
    write_text(path, page)


def _line(row: Row) -> str:
    verdict = "" if row.bar is None else ("met" if row.ok else "**missed**")
    bar = "" if row.bar is None else f"{row.sign} {_figure(row.bar, row.unit)}"
    return f"| {row.name.replace('|', '/')} | {_figure(row.value, row.unit)} | {bar} | {verdict} |"


def _figure(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


def _begin(name: str) -> str:
    return f"<!-- begin {name} -->"


def _end(name: str) -> str:
    return f"<!-- end {name} -->"
