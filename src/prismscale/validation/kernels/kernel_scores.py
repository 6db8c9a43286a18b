"""Every kind of kernel against public measurements: ``prismscale validate kernels``."""

from __future__ import annotations

from pathlib import Path

from prismscale.validation.error_rows import worst_first
from prismscale.validation.kernels import attention_scores, product_scores
from prismscale.validation.rows import Row

REMARKS = (*product_scores.REMARKS, *attention_scores.REMARKS)


def validate(truth: Path) -> list[Row]:
    """All rows, those that miss their bar by the most first.

    Raises:
        UsageError: no tables below ``truth``.
    """
    return worst_first([*product_scores.validate(truth), *attention_scores.validate(truth)])
