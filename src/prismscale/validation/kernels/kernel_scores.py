"""Scores all kinds of kernels on public measurements: ``prismscale validate kernels``."""

from __future__ import annotations

from pathlib import Path

from prismscale.validation.error_rows import worst_first
from prismscale.validation.kernels import (
    attention_scores,
    grouped_scores,
    memory_scores,
    product_scores,
)
from prismscale.validation.rows import Row

REMARKS = (
    *product_scores.REMARKS,
    *attention_scores.REMARKS,
    *grouped_scores.REMARKS,
    *memory_scores.REMARKS,
)


def validate(truth: Path) -> list[Row]:
    """Return all rows, those that miss their bar by most first.

    Raises:
        UsageError: there are no tables below ``truth``.
    """
    parts = (product_scores, attention_scores, grouped_scores, memory_scores)
    return worst_first([row for part in parts for row in part.validate(truth)])
