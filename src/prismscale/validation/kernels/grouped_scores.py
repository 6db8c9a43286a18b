"""Scores products of experts on public measurements of families on which nothing was fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.kernels.grouped_rows import FEWEST_ROWS, GroupedRow, load_grouped
from prismscale.validation.rows import Row

BARS = {True: Bars(median=12), False: Bars(median=15)}
"""Bars by whether tokens are spread evenly; otherwise they are spread by a power law."""
REMARKS = (
    "Experts: Transformer Engine's products are held against SimuMax's rows of training on a B200 "
    "(its single products gave the constants of the law; these have none of their own). Layers of "
    "experts are aiconfigurator's, on one GPU, with 64 rows an expert or more: kernels of servers "
    "for inference. Triton's, CUTLASS's and TensorRT-LLM's constants, and what their programs ran "
    "besides (harness.toml), are fitted on the other families, spread evenly (CUTLASS has two: one "
    "each). `_grouped_mm` has no public rows. A power law's spread is not in the signature: it is "
    "priced as if even.",
)


def validate(truth: Path) -> Iterator[Row]:
    """Yield all rows.

    Raises:
        UsageError: there are no measurements below ``truth``.
    """
    groups: dict[tuple[str, str, bool], list[GroupedRow]] = defaultdict(list)
    for row in load_grouped(truth):
        if row.held_out:
            groups[row.gpu, row.group, not row.is_even].append(row)
    for (gpu, group, is_uneven), rows in sorted(groups.items()):
        spread = "power law" if is_uneven else "balanced"
        bars = BARS[not is_uneven]
        enough = [row for row in rows if row.rows >= FEWEST_ROWS]
        yield from error_rows(f"{gpu} experts {group}, {spread}", _errors(enough), bars)
        fewer = [row for row in rows if row.rows < FEWEST_ROWS]
        yield from error_rows(f"{gpu} experts {group}, {spread}, fewer rows", _errors(fewer))


def _errors(rows: list[GroupedRow]) -> list[float]:
    """Return the errors of rows, in %."""
    return [row.error_percent(_model(row.gpu, row.sustained)) for row in rows]


@cache
def _model(gpu: str, sustained: bool) -> ModelledKernels:
    profile = KernelProfile.load(gpu)
    return ModelledKernels(profile=profile if sustained else profile.burst())
