"""The arithmetic of ``bench/error_summary.py``."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_error_summary_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias keeps the sign that the errors lose."""
    monkeypatch.syspath_prepend(str(BENCH))
    summarize_errors = importlib.import_module("error_summary").summarize_errors
    summary = summarize_errors([90, 110, 120], [100, 100, 100])

    assert summary.median == pytest.approx(0.1)
    assert summary.bias == pytest.approx(0.1)
    assert summary.worst == pytest.approx(0.2)
