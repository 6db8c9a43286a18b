"""Everything that forecasts are held against: ``prismscale validate forecast``."""

from __future__ import annotations

from pathlib import Path

from prismscale.analysis.rows import Row
from prismscale.forecast import (
    validate_distribution,
    validate_mlperf,
    validate_scale,
    validate_straggler,
)

REMARKS = (
    "MLPerf p99: runs have 150-600 steps, so p99 is decided by two to six of them. Random halves "
    "of one run differ by as much as the row below says, which is more than the bar allows.",
    "SE and ST distributions: figures are means over random splits, and two measured halves "
    "differ by what is called the floor. ST's p95 is decided by 2 of its 32 steps.",
    "Blocks of n^(1/3) neighbouring microbatches are the textbook length of a block bootstrap. "
    "Lengths 1, 2, 3, 4 and 8 were looked at: 1 misses SE's median, 8 misses SE's p95.",
    "Drift and jitter are told apart by a running median of 9 steps. 5, 17 and 33 steps give the "
    "same figures within 0.01 of KS.",
    "Placement: speeds of nodes are assumed, durations are the traces'. The miss on ST is with "
    "one node 14 % slower at worst; one node 30 % slower passes. Replicas keep their own "
    "recorded durations, so a search may end a little below the best of the placements that are "
    "equal in law.",
)


def validate(truth: Path, *, scale: bool = True) -> list[Row]:
    """All rows, from exact laws to production traces.

    Args:
        truth: folder of public measurements; ``straggler`` and ``mlperf`` lie in it.
        scale: time draws of large jobs too.

    Raises:
        FormatError: files that are missing or damaged.
    """
    return [
        *validate_straggler.validate(truth),
        *validate_distribution.validate(truth),
        *validate_mlperf.validate(truth),
        *(validate_scale.validate() if scale else []),
    ]
