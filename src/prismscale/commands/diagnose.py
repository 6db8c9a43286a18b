"""``prismscale diagnose``: which rank a job that hangs waits for, from its flight records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from prismscale.diagnosis.expected import ExpectedCalls
from prismscale.diagnosis.finding import Cause, HangFinding, diagnose
from prismscale.errors import UsageError
from prismscale.formats.flight_recorder.dump_reader import load_flight_record
from prismscale.graph.io import GRAPH_FILE, load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.progress import terminal
from prismscale.runfolder import RunFolder


def diagnose_dumps(
    dumps: Annotated[
        Path, typer.Argument(help="Folder of flight records, a file for each rank (PREFIX<rank>).")
    ],
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Run folder of the same job: says where in the program a rank stands.",
            show_default="none",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="What the files' names begin with.", show_default="found"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the finding as JSON.")] = False,
) -> None:
    """Say which rank a job that hangs waits for, at which line, and who waits.

    Reads what torch's flight recorder wrote (TORCH_NCCL_DUMP_ON_TIMEOUT), or --hang of a run.
    """
    record = load_flight_record(dumps, prefix)
    expected = ExpectedCalls(_graph(run), record) if run is not None else None
    finding = diagnose(record, expected)
    if as_json:
        typer.echo(json.dumps(_plain(finding), indent=2))
        return
    console = terminal()
    console.print(
        f"{len(record.ranks):,} records of {record.world_size:,} ranks: {finding.cause.value}",
        markup=False,
    )
    console.print(finding.text(), markup=False, soft_wrap=True)


def _graph(run: Path) -> JobGraph:
    folder = RunFolder(root=run).graph
    found = folder if (folder / GRAPH_FILE).is_file() else run
    if not (found / GRAPH_FILE).is_file():
        raise UsageError(f"{run} holds no run: make one with prismscale run --out {run}")
    return load_graph(found)


def _plain(finding: HangFinding) -> dict[str, object]:
    return {
        "cause": finding.cause.name.lower(),
        "culprits": list(finding.culprits),
        "site": finding.site,
        "stands_at": finding.stands_at,
        "explanation": finding.explanation,
        "waiting": finding.n_waiting if finding.cause is not Cause.NOTHING else 0,
        "waits": list(finding.waits),
    }
