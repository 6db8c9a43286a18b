"""Transformer Engine's Python code finds the stand-in whichever way it loads its binaries."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prismscale.devices.null.libraries import transformer_engine
from prismscale.devices.null.libraries.import_finder import StandInFinder

COMMON_BY_FILE = """
from pathlib import Path

def get_te_path():
    return Path(__file__).parent
"""
PYTORCH_BY_FILE = """
import importlib.util
import sys
from transformer_engine.common import get_te_path

so_path = next((get_te_path() / "wheel_lib").glob("transformer_engine_torch.*.so"))
spec = importlib.util.spec_from_file_location("transformer_engine_torch", so_path)
extension = importlib.util.module_from_spec(spec)
sys.modules["transformer_engine_torch"] = extension
spec.loader.exec_module(extension)
"""
COMMON_BY_NAME = """
import os
building = "NVTE_PROJECT_BUILDING" in os.environ

def load_framework_extension(framework):
    raise FileNotFoundError(framework)
"""
PYTORCH_BY_NAME = """
from transformer_engine import common

common.load_framework_extension("torch")
import transformer_engine_torch as extension
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the library's Python code; imports are answered during the test."""
    monkeypatch.setattr(transformer_engine, "installed", lambda: "")
    folder = tmp_path / "transformer_engine"
    for package in (folder, folder / "common", folder / "pytorch"):
        package.mkdir()
        (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: module for name, module in sys.modules.items() if _is_its(name)}
    for name in before:
        del sys.modules[name]
    finder = StandInFinder([transformer_engine.stand_in()])
    finder.begin()
    yield folder
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if _is_its(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def _is_its(name: str) -> bool:
    return name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch")


def test_a_file_that_is_looked_for_is_there(library: Path) -> None:
    """As versions up to 2.3 do; afterwards the library's own functions are back."""
    (library / "common" / "__init__.py").write_text(COMMON_BY_FILE)
    (library / "pytorch" / "__init__.py").write_text(PYTORCH_BY_FILE)
    spec_of_file = importlib.util.spec_from_file_location
    module: Any = importlib.import_module("transformer_engine.pytorch")
    common: Any = importlib.import_module("transformer_engine.common")
    assert callable(module.extension.generic_gemm)
    assert common.get_te_path() == library / "common"
    assert importlib.util.spec_from_file_location is spec_of_file


def test_the_extension_is_a_module_like_others(library: Path) -> None:
    """From 2.4 on; the core library is not looked for."""
    (library / "common" / "__init__.py").write_text(COMMON_BY_NAME)
    (library / "pytorch" / "__init__.py").write_text(PYTORCH_BY_NAME)
    module: Any = importlib.import_module("transformer_engine.pytorch")
    assert callable(module.extension.generic_gemm)
    assert module.common.building
