"""Lets Transformer Engine's Python code be imported without the binaries that it loads.

Source: transformer_engine/common/__init__.py and pytorch/__init__.py of Transformer Engine 2.2 to
2.18.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

from prismscale.devices.null.libraries.transformer_engine.versions import EXTENSION


@contextmanager
def without_core_library(common: Any) -> Iterator[None]:
    """Import ``transformer_engine.common`` without the core library.

    The import runs as in the library's own build, which has no binary yet. Framework extensions are
    then imported like other modules.
    """
    variable = "NVTE_PROJECT_BUILDING"
    given = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]
        else:
            os.environ[variable] = given
    common.load_framework_extension = _import_extension


def _import_extension(framework: str) -> None:
    importlib.import_module(f"transformer_engine_{framework}")


@contextmanager
def with_file_of_extension(_: Any) -> Iterator[None]:
    """Import ``transformer_engine.pytorch`` as if the extension's file existed.

    Up to 2.3 it looks for the file in the library's folder, and makes the module from it.
    """
    common: Any = importlib.import_module("transformer_engine.common")
    util: Any = importlib.util
    if not hasattr(common, "get_te_path"):
        yield
        return
    folder, spec_of_file = common.get_te_path, util.spec_from_file_location

    def spec_from_file_location(name: str, *arguments: Any, **named: Any) -> ModuleSpec | None:
        if name == EXTENSION:
            return importlib.util.find_spec(name)
        return spec_of_file(name, *arguments, **named)

    common.get_te_path, util.spec_from_file_location = _Anywhere, spec_from_file_location
    try:
        yield
    finally:
        common.get_te_path, util.spec_from_file_location = folder, spec_of_file


class _Anywhere:
    """Path of a folder that holds every file that is looked for, as each of its subfolders does."""

    def __truediv__(self, _: str) -> _Anywhere:
        return self

    def glob(self, pattern: str) -> Iterator[str]:
        """Yield one file."""
        yield pattern
