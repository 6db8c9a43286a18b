"""All validations of forecasts: ``prismscale validate forecast``."""

from __future__ import annotations

from pathlib import Path

from prismscale.validation import distribution, mlperf, straggler_traces
from prismscale.validation import scale as scale_rows
from prismscale.validation.rows import Row

REMARKS = (
    "MLPerf p99: runs have 150-600 steps, so p99 is decided by two to six of them, and which runs "
    "of a job have stalls is chance. The bar lies below what the data allow: the distribution of "
    "all repeat runs together, the one that is forecast among them, misses it too. The forecast "
    "takes the tail beyond a run's last 8 steps from runs of other configurations; no figure of a "
    "repeat run is in it. From 4 to 16 steps were looked at: 4 to 6 and 10 to 16 do worse.",
    "SE and ST distributions: figures are means over random splits, and two measured halves "
    "differ by what is called the floor. ST's p95 is decided by 2 of its 32 steps.",
    "Blocks of n^(1/3) neighbouring microbatches are the textbook length of a block bootstrap. "
    "Lengths 1, 2, 3, 4 and 8 were looked at: 1 misses SE's median, 8 misses SE's p95.",
    "Drift and jitter are told apart by a running median of 9 steps. 5, 17 and 33 steps give the "
    "same figures within 0.01 of KS.",
    "Placement: speeds of nodes are assumed, durations are the traces'. 1.64-14.04 % is how much a "
    "kernel's time varies over a fleet (PRISM). Read as a coefficient of variation the upper end "
    "passes; read as a range (no node more than 14 % slower than the fastest) ST misses, where all "
    "nodes at the slow end cost no more than the row below says. Replicas keep their own "
    "recorded durations, so a search may end a little below the best of the placements that are "
    "equal in distribution.",
)


def validate(truth: Path, *, scale: bool = True) -> list[Row]:
    """Return all rows, from exact distributions to production traces.

    Args:
        truth: folder of public measurements, with the folders ``straggler`` and ``mlperf``.
        scale: also time the draws of large jobs.

    Raises:
        FormatError: files are missing or damaged.
    """
    return [
        *straggler_traces.validate(truth),
        *distribution.validate(truth),
        *mlperf.validate(truth),
        *(scale_rows.validate() if scale else []),
    ]
