"""Parser of ``--routing``: the number of tokens per expert, from the command line or a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from prismscale.devices.balance import PRESETS, Balance, ratios_of_preset
from prismscale.devices.routing import Routing
from prismscale.errors import FormatError, UsageError, shown
from prismscale.typed_files import text_of

_ALLOWED = (
    "give uniform, zipf:S with S from 0 to 10, "
    f"{', '.join(PRESETS)} with :N ranks that experts are spread over (moderate:8), "
    "balance:ranks=N,max=1.5,… or a CSV file of tokens by expert"
)
MOST_NUMBERS = 1 << 20
"""Most numbers in a file, so that the instructions for ranks stay small."""


def parse_routing(text: str) -> Routing:
    """Read ``uniform``, ``zipf:1.2``, ``moderate:8``, ``balance:ranks=8,max=1.5`` or a CSV file.

    A file whose header has ``step``, ``expert`` and ``tokens`` is a table by step. A file whose
    header has ``ranks`` and any of ``min``, ``max``, ``avg``, ``std``, ``median``, ``skew`` has
    the statistics of one step in each line. In any other file the last field of each line is an
    expert's load, and a first line without a number is a header.

    Raises:
        UsageError: the text is none of these.
        FormatError: the file has a line without a number.
    """
    name, _, argument = text.partition(":")
    if text == "uniform":
        return Routing()
    if name == "zipf":
        try:
            return Routing(exponent=float(argument))
        except ValueError:
            raise UsageError(f"--routing {text}; {_ALLOWED}") from None
    if name in PRESETS:
        if not argument.isdecimal():
            raise UsageError(f"--routing {text}; {_ALLOWED}")
        return Routing(loads=(ratios_of_preset(name, int(argument)),), of_ranks=True)
    if name == "balance":
        return Routing(loads=(Balance.parse(argument).ratios(),), of_ranks=True)
    return _read(Path(text))


def _read(path: Path) -> Routing:
    try:
        text = text_of(path)
    except OSError as error:
        raise UsageError(f"--routing {path}: {error}; {_ALLOWED}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    header = [field.strip() for field in lines[0].split(",")] if lines else []
    if {"step", "expert", "tokens"} <= set(header):
        return Routing(loads=_tables(path, lines))
    if "ranks" in header:
        return Routing(loads=_statistics(path, lines), of_ranks=True)
    return Routing(loads=(_loads(path, lines),))


def _loads(path: Path, lines: Sequence[str]) -> tuple[float, ...]:
    loads = []
    for number, line in enumerate(lines, 1):
        field = line.split(",")[-1].strip()
        try:
            loads.append(float(field))
        except ValueError:
            if number > 1:
                raise FormatError(
                    f"{path}: line {number} ends with no number: {shown(field)}"
                ) from None
    if not loads:
        raise FormatError(f"{path}: no loads of experts; give one line for each expert")
    return tuple(loads)


def _rows(path: Path, lines: Sequence[str]) -> list[dict[str, float]]:
    found = []
    for number, row in enumerate(csv.DictReader(io.StringIO("\n".join(lines))), 2):
        try:
            filled = {str(k).strip(): v for k, v in row.items() if v is not None and v.strip()}
            found.append({k: float(v) for k, v in filled.items()})
        except (ValueError, AttributeError):
            raise FormatError(f"{path}: line {number} has a field that is no number") from None
    if not found or len(found) * len(found[0]) > MOST_NUMBERS:
        raise FormatError(
            f"{path}: has {len(found):,} lines; allowed: 1 to {MOST_NUMBERS:,} fields"
        )
    return found


def _tables(path: Path, lines: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    by_step: dict[float, dict[int, float]] = {}
    for number, row in enumerate(_rows(path, lines), 2):
        if not {"step", "expert", "tokens"} <= row.keys():
            raise FormatError(f"{path}: line {number} lacks step, expert or tokens")
        by_step.setdefault(row["step"], {})[int(row["expert"])] = row["tokens"]
    experts = sorted(by_step[min(by_step)])
    for step, tokens in by_step.items():
        if sorted(tokens) != list(range(len(experts))):
            raise FormatError(
                f"{path}: step {step:g} has {len(tokens)} experts; every step needs each from 0 "
                f"to {len(experts) - 1} once"
            )
    return tuple(tuple(by_step[s][e] for e in experts) for s in sorted(by_step))


def _statistics(path: Path, lines: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    rows = _rows(path, lines)
    for number, row in enumerate(rows, 2):
        row.pop("step", None)
        unknown = row.keys() - {"ranks", "min", "max", "avg", "std", "median", "skew"}
        if unknown:
            raise FormatError(f"{path}: line {number} has the unknown column {min(unknown)!r}")
    return tuple(Balance.of(row).ratios() for row in rows)
