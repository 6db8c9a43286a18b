"""Scores memory-bound kernels on public measurements on which nothing was fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.kernels.memory_rows import MemoryRow, load_memory_rows
from prismscale.validation.rows import Row

BARS = Bars(median=10, p90=30)
SHORTEST_NS = 8_000
REMARKS = (
    "Norms in 16 bits: cudnn-frontend's rows of the models that are held out, 5 a score. That "
    "torch's norms read rows of more than 4,096 elements again was thought of with all of these "
    "rows in sight. On an H100 they are of another source (bench/results/h100), and all rows of an "
    "H200 are unseen.",
    "Eager kernels: Liger's rows whose operators are known (norms, cross entropy, embeddings, "
    "squared ReLU), none of them fitted; medians of runs with a cold L2 cache, held against the "
    "model without one. Its programs of "
    "rotary embeddings, fused losses and gated activations are of operators or shapes that its "
    "rows do not state. No public rows of optimizers were found.",
    "Operators in running models: TraceLens on an H100, none of them fitted. That additions of "
    "transposed operands are slow was seen in two of these rows first.",
)


def validate(truth: Path) -> Iterator[Row]:
    """Yield all rows.

    Raises:
        UsageError: there are no measurements below ``truth``.
    """
    groups: dict[tuple[str, str], list[MemoryRow]] = defaultdict(list)
    for row in load_memory_rows(truth):
        if row.held_out:
            groups[row.gpu, row.group].append(row)
    for (gpu, group), rows in sorted(groups.items()):
        warm = KernelProfile.load(gpu).burst()
        errors = [
            row.error_percent(ModelledKernels(profile=warm.cold() if row.is_cold else warm))
            for row in rows
        ]
        yield from error_rows(f"{gpu} {group}", errors, BARS)
        long = [e for e, row in zip(errors, rows, strict=True) if row.time_ns >= SHORTEST_NS]
        if len(long) < len(errors):
            yield from error_rows(f"{gpu} {group}, 8 µs and more", long)
