"""The arithmetic of ``bench/error_summary.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_error_summary_counts_both_directions(bench_module: Callable[[str], Any]) -> None:
    """The bias keeps the sign that the errors lose."""
    summary = bench_module("error_summary").summarize_errors([90, 110, 120], [100, 100, 100])

    assert summary.median == pytest.approx(0.1)
    assert summary.bias == pytest.approx(0.1)
    assert summary.worst == pytest.approx(0.2)
