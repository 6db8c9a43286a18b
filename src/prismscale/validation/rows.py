"""Rows of a validation: a measured figure, its bar, and whether the bar is met.

Every bench and every ``prismscale validate`` prints rows and writes them as JSON: a list of objects
``{"name", "value", "unit", "bar", "least", "ok"}``, with ``"note"`` where a row has a note, and
with ``"others"`` where there are other predictions of the same figure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prismscale.errors import StorageError

FILE_WIDTH = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured figure."""

    name: str
    value: float
    unit: str = ""
    bar: float | None = None
    """Upper bound of the figure; None for no bound."""
    least: bool = False
    """Whether the bar is a lower bound instead."""
    ok: bool = True
    """Whether the bar is met."""
    note: str = ""
    """What the row was measured on, and why it misses its bar if that is known."""
    others: Mapping[str, float] = field(default_factory=dict)
    """The same figure from other predictions, by the name of their source."""

    @property
    def subject(self) -> str:
        """What was measured: the name before its colon. A bench may have many rows of a subject."""
        return self.name.partition(":")[0]

    @property
    def sign(self) -> str:
        """Sign of the relation that the value should have to its bar."""
        return "≥" if self.least else "≤"

    @staticmethod
    def at_most(name: str, value: float, bar: float, unit: str = "") -> Row:
        """Return a row whose figure must not exceed ``bar``; not-a-number never passes."""
        return Row(name=name, value=value, unit=unit, bar=bar, ok=bool(value <= bar))

    @staticmethod
    def at_least(name: str, value: float, bar: float, unit: str = "") -> Row:
        """Return a row whose figure must reach ``bar``; not-a-number never passes."""
        return Row(name=name, value=value, unit=unit, bar=bar, least=True, ok=bool(value >= bar))

    @staticmethod
    def told(name: str, value: float, unit: str = "") -> Row:
        """Return a row without a bar."""
        return Row(name=name, value=value, unit=unit)


def print_rows(rows: Iterable[Row], *, title: str = "", console: Console | None = None) -> None:
    """Print rows as a table on the terminal."""
    table = Table(title=title or None)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    for row in rows:
        verdict = "" if row.bar is None else ("[green]ok[/]" if row.ok else "[red]MISSED[/]")
        table.add_row(
            row.name,
            f"{_figure(row.value)} {row.unit}".rstrip(),
            "" if row.bar is None else f"{row.sign} {_figure(row.bar)} {row.unit}".rstrip(),
            verdict,
        )
    (console or _console()).print(table)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSON; non-finite figures become null, because JSON has no such numbers.

    Raises:
        StorageError: the file cannot be written.
    """
    plain = [_plain(row) for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def read_rows(path: Path | None) -> list[Row]:
    """Read the rows that an earlier run wrote to ``path``; none if there is no file."""
    if path is None or not path.exists():
        return []
    rows = json.loads(path.read_text())
    return [
        Row(**{**row, "value": math.nan if row["value"] is None else row["value"]}) for row in rows
    ]


def renewed(rows: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Return ``rows``, with ``found`` in place of all rows of the same subjects.

    A bench calls this after each measured subject and writes the result. A bench that is
    interrupted therefore loses no earlier row.
    """
    subjects = {row.subject for row in found}
    return [*(row for row in rows if row.subject not in subjects), *found]


def finish(rows: Sequence[Row], *, title: str = "", json_path: Path | None = None) -> int:
    """Print the table, and write it to ``json_path`` if given.

    Returns:
        The exit code: 1 if a bar is missed or nothing was measured.

    Raises:
        StorageError: the file cannot be written.
    """
    print_rows(rows, title=title)
    if json_path is not None:
        write_rows(rows, json_path)
    return 0 if rows and all(row.ok for row in rows) else 1


def _plain(row: Row) -> dict[str, object]:
    plain = {key: _finite(value) for key, value in asdict(row).items()}
    for empty in ("note", "others"):
        if not plain[empty]:
            del plain[empty]
    return plain


def _console() -> Console:
    """Return a console as wide as the terminal; in a file, wide enough for a row's name."""
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
