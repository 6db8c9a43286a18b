"""``prismscale calibrate``: a cluster file from measurements, made here or brought along."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from prismscale.cluster import Cluster
from prismscale.commands.calibration_table import CalibratedStep, print_calibration
from prismscale.errors import FormatError, UsageError
from prismscale.files import write_text
from prismscale.forecast.recording import Changes
from prismscale.forecast.step_calibration import (
    MOST_MODELLED,
    MeasuredJob,
    StoredStep,
    calibrate_steps,
)
from prismscale.forecast.step_spread import step_spread
from prismscale.formats.nccl_tests import measured_from, parse_nccl_tests
from prismscale.progress import TerminalReporter, terminal
from prismscale.report.folder import read_results
from prismscale.runfolder import RunFolder
from prismscale.typed_files import text_of

_UNITS = {"ms": 1e6, "s": 1e9}
_STEP = re.compile(r"(\d+\.?\d*|\.\d+)\s*(ms|s)")

calibrate = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Write a cluster file from measurements."
)


@calibrate.command()
def collectives(
    out: Annotated[Path, typer.Option(help="TOML file to write.")] = Path("loopback-gloo.toml"),
    world_size: Annotated[int, typer.Option(help="Processes that communicate.")] = 2,
    max_bytes: Annotated[int, typer.Option(help="Largest message.")] = 64 << 20,
) -> None:
    """Measure gloo collectives between processes of this machine; use the file as --cluster."""
    # Imported here: torch takes seconds, and no other command line needs it.
    from prismscale.measure.collectives import DEFAULT_SIZES, measure_collectives

    console = terminal()
    sizes = [s for s in DEFAULT_SIZES if s <= max_bytes]
    with TerminalReporter(console).stage("calibrate") as update:
        measure_collectives(
            world_size=world_size,
            sizes=sizes,
            out=out,
            progress=lambda _, share: update(round(share * 100), 100),
        )
    console.print(f"written: {out}; use it with --cluster {out}")


@calibrate.command("nccl-tests")
def nccl_tests(
    outputs: Annotated[
        list[Path],
        typer.Argument(help="What all_reduce_perf … printed."),
    ],
    cluster: Annotated[str, typer.Option(help="Preset or TOML file of the same GPUs.")],
    out: Annotated[Path, typer.Option(help="TOML file to write.")] = Path("measured.toml"),
) -> None:
    """Put the figures of nccl-tests into a cluster file; they go before modelled ones."""
    base = Cluster.load(cluster)
    rows = [row for path in outputs for row in parse_nccl_tests(_text(path))]
    measured = measured_from(rows, machine=base.name, date=datetime.now(tz=UTC).date().isoformat())
    if not measured.curves:
        raise FormatError("only rows of single ranks; run nccl-tests with two ranks or more")
    write_text(out, replace(base, name=out.stem, measured=measured).to_toml())
    console = terminal()
    for curve in measured.curves:
        console.print(
            f"{curve.op.spelling}: {curve.group_size} ranks on {curve.nodes} nodes, "
            f"{len(curve.n_bytes)} sizes"
        )
    console.print(f"written: {out}; use it with --cluster {out}")


@calibrate.command("steps")
def steps(
    measured: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN=STEP…",
            help="Folder of a run on --device null, and the step that its job took, such as "
            "runs/narrow=1.93s.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="TOML file to write.")] = Path("calibrated.toml"),
) -> None:
    """Calibrate the null device's times by steps that you measured, in a cluster file."""
    console = terminal()
    given = [_measured_step(text) for text in measured]
    runs = [run for run, _ in given]
    cluster = _one_cluster(runs)
    steps = [MeasuredJob(measured_ns=ns, model=run.with_factors) for run, ns in given]
    with TerminalReporter(console).stage("calibrate") as update:
        done, most = count(1), len(runs) * MOST_MODELLED
        found = calibrate_steps(steps, lambda: update(min(next(done), most), most))
    device = replace(cluster.device, calibration=found.calibration)
    write_text(out, replace(cluster, name=out.stem, device=device).to_toml())
    told = [
        CalibratedStep(
            name=str(run.folder),
            measured_ns=measured_ns,
            # Without the factors of a cluster that was calibrated before.
            modelled_ns=run.with_factors(1.0, 1.0),
            # As run and forecast show it on the cluster that was written.
            calibrated_ns=step_spread(run.folder, changes=Changes(cluster=str(out))).p50_ns,
        )
        for run, measured_ns in given
    ]
    print_calibration(console, found, told)
    console.print(f"written: {out}; use it with --cluster {out}", soft_wrap=True)


def _measured_step(text: str) -> tuple[StoredStep, float]:
    """What one ``RUN=STEP`` means, in nanoseconds."""
    folder, equals, step = text.rpartition("=")
    found = _STEP.fullmatch(step.strip())
    if not equals or not folder or found is None or not float(found[1]) > 0:
        raise UsageError(
            f"{text!r}: give a run's folder and the step that its job took, such as "
            f"runs/narrow=1.93s; units: {', '.join(_UNITS)}"
        )
    result = read_results(RunFolder(root=Path(folder)))
    if result.hung:
        raise UsageError(f"{folder}: the job hangs, so it has no steps")
    run = StoredStep(folder=Path(folder), step_ns=result.step_ns, median_ns=result.median_ns)
    return run, float(found[1]) * _UNITS[found[2]]


def _one_cluster(runs: Sequence[StoredStep]) -> Cluster:
    """That of all runs; it is theirs that is calibrated."""
    first, *others = runs
    for other in others:
        if other.cluster != first.cluster:
            raise UsageError(
                f"{first.folder} is a run on {first.cluster.name}, {other.folder} one on "
                f"{other.cluster.name}, or on another of that name; calibrate by runs on one "
                "cluster"
            )
    return first.cluster


def _text(path: Path) -> str:
    try:
        return text_of(path, errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from error
