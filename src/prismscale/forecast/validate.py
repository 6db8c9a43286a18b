"""Everything that forecasts are held against: ``prismscale validate forecast``."""

from __future__ import annotations

from pathlib import Path

from prismscale.analysis.rows import Row
from prismscale.forecast import validate_distribution, validate_mlperf, validate_straggler


def validate(truth: Path) -> list[Row]:
    """All rows, from exact laws to production traces.

    Args:
        truth: folder of public measurements; ``straggler`` and ``mlperf`` lie in it.

    Raises:
        FormatError: files that are missing or damaged.
    """
    return [
        *validate_straggler.validate(truth),
        *validate_distribution.validate(truth),
        *validate_mlperf.validate(truth),
    ]
