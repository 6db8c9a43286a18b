"""Explains a hang in a graph: makes a finding, and writes a flight record of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prismscale.diagnosis.expanded import expanded_record
from prismscale.diagnosis.finding import Cause, HangFinding, diagnose
from prismscale.diagnosis.standstill import stand_still
from prismscale.errors import MismatchError, StuckError
from prismscale.formats.flight_recorder.dump_writer import write_flight_record
from prismscale.graph.job_graph import JobGraph


def explain(graph: JobGraph, hang: Mapping[int, int], folder: Path) -> HangFinding:
    """Find out which ranks cause ``graph`` to hang. Writes each rank's last calls to ``folder``.

    Args:
        graph: may be illegal. Each rank in ``hang`` has a class of its own.
        hang: by rank, the steady step at the beginning of which it stops.
        folder: where flight records are written. None are written if all ranks go on.

    Raises:
        StorageError: a file cannot be written.
    """
    record = expanded_record(graph, stand_still(graph, hang))
    finding = diagnose(record)
    if finding.cause is not Cause.NOTHING:
        write_flight_record(record, folder)
    return finding


@contextmanager
def explained(graph: JobGraph, folder: Path) -> Iterator[None]:
    """Add the cause to mismatches and deadlocks that the body finds in ``graph``.

    Raises:
        MismatchError, StuckError: those of the body, with the finding and the records' folder.
    """
    try:
        yield
    except (MismatchError, StuckError) as error:
        finding = explain(graph, {}, folder)
        if finding.cause is Cause.NOTHING:
            raise
        raise type(error)(f"{error}\n{sentences(finding, folder)}") from error


def refuse_standstill(graph: JobGraph, folder: Path) -> None:
    """Refuse a graph of whole programs in which ranks hang.

    Raises:
        MismatchError: some ranks hang; it names the cause.
    """
    finding = explain(graph, {}, folder)
    if finding.cause is not Cause.NOTHING:
        raise MismatchError(f"the job does not go on: {sentences(finding, folder)}")


def sentences(finding: HangFinding, folder: Path) -> str:
    """Return the finding in words, with the folder of its flight records."""
    return (
        f"{finding.text()}\nWhat each rank called last: {folder}, for torchfrtrace and "
        "prismscale diagnose"
    )
