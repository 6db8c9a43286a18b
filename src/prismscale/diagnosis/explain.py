"""From a graph that stands still to a finding, with a flight record of every rank."""

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
    """Who begins the standstill of ``graph``; what every rank called last goes to ``folder``.

    Args:
        graph: may be illegal. Ranks that hang have classes of their own.
        hang: by rank, the steady step at whose beginning it stops.
        folder: takes the flight records; nothing is written if all ranks go on.

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
    """A mismatch or deadlock that is found in ``graph`` meanwhile says who began it.

    Raises:
        MismatchError, StuckError: the same ones, with the finding and where the records lie.
    """
    try:
        yield
    except (MismatchError, StuckError) as error:
        finding = explain(graph, {}, folder)
        if finding.cause is Cause.NOTHING:
            raise
        raise type(error)(f"{error}\n{sentences(finding, folder)}") from error


def refuse_standstill(graph: JobGraph, folder: Path) -> None:
    """Refuse a graph of whole programs whose ranks stop somewhere.

    Raises:
        MismatchError: says who began it.
    """
    finding = explain(graph, {}, folder)
    if finding.cause is not Cause.NOTHING:
        raise MismatchError(f"the job does not go on: {sentences(finding, folder)}")


def sentences(finding: HangFinding, folder: Path) -> str:
    """The finding and where its flight records lie."""
    return (
        f"{finding.text()}\nWhat each rank called last: {folder}, for torchfrtrace and "
        "prismscale diagnose"
    )
