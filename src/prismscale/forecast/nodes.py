"""Machines of unequal speed."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from prismscale.errors import FormatError, UsageError


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine and how slow it is."""

    name: str
    factor: float
    """Of its computation time: 1.1 is 10 % slower than nominal."""


def read_nodes(path: Path) -> tuple[Node, ...]:
    """Nodes from a CSV with columns ``node`` and ``factor`` (or ``speed``, its inverse).

    Raises:
        FormatError: other columns, a factor that is no positive number, a name that repeats.
        UsageError: the file cannot be read.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    nodes = []
    for line, row in enumerate(rows, start=2):
        try:
            factor = float(row["factor"]) if "factor" in row else 1 / float(row["speed"])
            name = row["node"]
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(
                f"{path}, line {line}: expected columns node and factor (or speed), both filled"
            ) from error
        if not 0 < factor < math.inf:
            raise FormatError(f"{path}, line {line}: factor {factor} must be positive")
        nodes.append(Node(name=name, factor=factor))
    repeated = [name for name, n in Counter(n.name for n in nodes).items() if n > 1]
    if not nodes or repeated:
        raise FormatError(f"{path}: {len(nodes)} nodes; named twice: {', '.join(repeated) or '-'}")
    return tuple(nodes)
