"""Benches run by hand, so nothing else notices that what they import has moved."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHES = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_what_a_bench_imports_of_prismscale_is_there(path: Path) -> None:
    """Names and modules, looked up without running the bench."""
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    missing = [
        f"{node.module}.{alias.name}"
        for node in imports
        if node.module and node.module.split(".")[0] == "prismscale"
        for alias in node.names
        if not hasattr(importlib.import_module(node.module), alias.name)
        and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
    ]
    assert missing == []
