"""``prismscale profile-kernels``: measure a job's kernels on one real GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismscale.analysis.emulated import Emulated
from prismscale.errors import UsageError
from prismscale.progress import TerminalReporter, terminal

_SHOWN = 5


def profile_kernels(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run with --device null, or one rank's .null.json in it.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Table to write.")] = Path("kernels.json"),
) -> None:
    """Measure a job's distinct kernels on one GPU; the table replaces modelled figures."""
    signatures = signatures_of(run)
    # Imported here: torch takes seconds, and a wrong path is told without it.
    import torch

    from prismscale.measure.kernel_timing import profile_kernels as measure

    if not torch.cuda.is_available():
        raise UsageError(
            "profile-kernels measures on a GPU, and torch sees none here. Copy "
            f"{run} to a machine with the GPU you want (one is enough), run the same command there "
            "with a CUDA build of torch, and bring the table back"
        )
    console = terminal()
    with TerminalReporter(console).stage("kernels") as update:
        table = measure(signatures, torch.device("cuda"), progress=update)
    table.save(out)
    console.print(f"{len(table.kernels)} kernels measured on {table.device}; written: {out}")
    if table.left_out:
        console.print(f"{len(table.left_out)} left to the model, for example:")
    for signature, reason in list(table.left_out.items())[:_SHOWN]:
        console.print(f"  {signature.split(chr(0x1F))[0]}: {reason}", markup=False)


def signatures_of(run: Path) -> list[str]:
    """The distinct kernels of a run's captured ranks, longest in all first.

    Raises:
        UsageError: there are none.
        FormatError: a file that is none of a null device.
    """
    files = [run] if run.is_file() else sorted(run.glob("captures/*/rank-*.null.json"))
    if not files:
        raise UsageError(
            f"{run} holds no kernels of a null device; give the folder of a "
            "`prismscale run --device null`"
        )
    total_ns: dict[str, int] = {}
    for path in files:
        for use in Emulated.load(path).kernels:
            total_ns[use.signature] = total_ns.get(use.signature, 0) + use.total_ns
    launched = [signature for signature, ns in total_ns.items() if ns > 0]
    if not launched:
        raise UsageError(f"{run}: its captured ranks launched no kernel")
    return sorted(launched, key=lambda signature: -total_ns[signature])
