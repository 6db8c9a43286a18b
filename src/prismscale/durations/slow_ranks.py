"""Parses ``--slow``: ``RANK=FACTOR`` for one rank or a range, on the command line or in a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from prismscale.errors import UsageError
from prismscale.graph.parquet import MAX_WORLD_SIZE


def slow_ranks(texts: Iterable[str]) -> dict[int, float]:
    """Parse ``17=1.3``, ``8-15=1.3``, or ``@FILE`` with such lines, into factors by rank.

    Raises:
        UsageError: a text has another form, or a file cannot be read.
    """
    found: dict[int, float] = {}
    for text in texts:
        if text.startswith("@"):
            found.update(slow_ranks(_lines(Path(text[1:]))))
            continue
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?=(\d{1,18}\.?\d{0,18})", text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f"--slow {text!r}: give RANK=FACTOR, for example 17=1.3 or 8-15=1.3, or @FILE"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= MAX_WORLD_SIZE:
            raise UsageError(f"--slow {text!r}: jobs have {MAX_WORLD_SIZE:,} ranks at most")
        found.update(dict.fromkeys(range(first, last + 1), float(match[3])))
    return found


def slow_lines(ranks: Sequence[Sequence[int]], factors: Sequence[float]) -> str:
    """Format the consecutive ranks of each node and its factor as lines for ``--slow @FILE``."""
    return "".join(
        f"{own[0]}-{own[-1]}={factor:.9g}\n" for own, factor in zip(ranks, factors, strict=True)
    )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--slow @{path}: cannot be read: {error}") from error
    if any(line.startswith("@") for line in lines):
        raise UsageError(f"--slow @{path}: names another file; write RANK=FACTOR lines")
    return lines
