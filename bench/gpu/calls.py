"""Calls that a GPU ran one by one against their prices, by kind of kernel.

    python bench/gpu/calls.py [--json]

No GPU is needed: ``bench/results`` has what `prismscale profile-kernels` measured on an H100 and on
an H200. Scored are calls of 20 µs and more of the programs of ``programs.py``, of which no constant
was fitted on any; shorter ones, and the H200's calls of shapes that constants of the H100 were
fitted on, are told. Bursts are held against the model without its power limit, in kinds of five
calls and more. Not among them: dropout, which was measured with a probability of 1; copies from and
to the host, whose memory was not pinned; calls of mixtures of experts whose share for each expert
the signature does not hold.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_measured import KernelTable, MeasuredKernel
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import parse_signature
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.kernels.memory_scores import BARS
from prismscale.validation.rows import Row, finish

RESULTS = Path(__file__).resolve().parents[1] / "results"
LONG_NS, FEW = 20_000, 5
LEFT_OUT = ("dropout", "transfer")
GROUPED = ("_grouped_mm", "_scaled_grouped_mm")


def main() -> int:
    """Print the rows of both GPUs; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="Write calls.json beside the tables.")
    options = parser.parse_args()
    of_programs = KernelTable.load(RESULTS / "h100" / "kernels_of_programs.json").kernels
    names = {kernel.signature for kernel in of_programs}
    h200 = KernelTable.load(RESULTS / "h200" / "kernels.json").kernels
    unseen = [kernel for kernel in h200 if kernel.signature in names]
    rows = {
        "h100": [*rows_of("h100-sxm", of_programs, BARS)],
        "h200": [
            *rows_of("h200-sxm", unseen, BARS),
            *rows_of("h200-sxm", [k for k in h200 if k.signature not in names], Bars(), "shapes"),
        ],
    }
    codes = []
    for gpu, found in rows.items():
        path = RESULTS / gpu / "calls.json" if options.json else None
        codes.append(finish(found, title=gpu, json_path=path))
    return max(codes)


def rows_of(gpu: str, kernels: Sequence[MeasuredKernel], bars: Bars, of: str = "") -> Iterator[Row]:
    """Of calls that the GPU ran; ``of`` says whose they are."""
    model = ModelledKernels(profile=KernelProfile.load(gpu).burst())
    errors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for kernel in kernels:
        call = parse_signature(kernel.signature)
        cost = model.cost_of_call(call)
        if cost.kind not in LEFT_OUT and call.base not in GROUPED and kernel.device_ns:
            error = 100 * (cost.device_ns / kernel.device_ns - 1)
            errors[cost.kind, kernel.device_ns >= LONG_NS].append(error)
    for (kind, is_long), found in sorted(errors.items()):
        if len(found) >= FEW:
            name = " ".join(filter(None, (gpu, of, kind, "" if is_long else "below 20 µs")))
            yield from error_rows(name, found, bars if is_long else Bars())


if __name__ == "__main__":
    sys.exit(main())
