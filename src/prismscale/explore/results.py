"""Results of a sweep as files: a table for spreadsheets and one for programs.

Neither says where or for how long points ran, so the same sweep writes the same bytes anywhere.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping
from typing import Any

from prismscale.explore.ranking import Explored, Ranking
from prismscale.explore.sweep_folder import SweepFolder
from prismscale.files import write_json, write_text

SCHEMA = "prismscale.explore/2"
FIELDS = (
    *("status", "fits", "step_ns", "p50_ns", "p95_ns", "tokens_per_step", "tokens_per_s", "mfu"),
    *("peak_bytes", "reserved_bytes", "held_bytes", "memory_bytes"),
    *("computation", "exposed", "bubble", "skew"),
    *("world_size", "cluster", "captured", "error", "reason"),
)


def write_results(ranking: Ranking, folder: SweepFolder, about: Mapping[str, Any]) -> None:
    """Write ``explore.json`` and ``explore.csv``; ``about`` describes the sweep.

    Raises:
        StorageError: a file cannot be written.
    """
    chosen = ranking.chosen
    found = {
        "schema": SCHEMA,
        **about,
        "ranked_by": "tokens_per_s" if ranking.by_tokens else "p50_ns",
        "chosen": None if chosen is None else dict(chosen.point.values),
        "front": [dict(row.point.values) for row in ranking.front],
        "points": [_row(row, folder) for row in ranking.rows],
    }
    write_json(folder.results, found)
    write_text(folder.table, _csv(ranking))


def figures_of(row: Explored) -> dict[str, Any]:
    """Return the fields of a row, by name."""
    found = {name: getattr(row.outcome, name) for name in FIELDS}
    return {**found, "status": row.outcome.status.value}


def _row(row: Explored, folder: SweepFolder) -> dict[str, Any]:
    run_folder = folder.points / row.point.folder_name
    return {
        "values": dict(row.point.values),
        **figures_of(row),
        "arguments": shlex.join(row.point.arguments),
        "environment": dict(row.point.environment),
        "folder": str(run_folder.relative_to(folder.root)),
    }


def _csv(ranking: Ranking) -> str:
    names = list(ranking.rows[0].point.values) if ranking.rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(f"{n}_varied" if n in FIELDS else n for n in names), *FIELDS])
    for row in ranking.rows:
        figures = figures_of(row)
        cells = ("" if figures[name] is None else figures[name] for name in FIELDS)
        writer.writerow([*row.point.values.values(), *cells])
    return text.getvalue()
