"""What tests of the project itself share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a bench by its name; benches are scripts, in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module
