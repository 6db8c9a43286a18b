"""What a stand-in for a library is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from prismscale.devices.stand_in_file import StandInFile
from prismscale.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """Modules that exist only as CUDA binaries, answered for on the null device.

    The library's own Python code runs unmodified on top of them.
    """

    name: str
    """For reports."""
    namespace: str
    """Of its kernels: ``transformer_engine`` of ``transformer_engine::layernorm_fwd``."""
    modules: Mapping[str, Callable[[], ModuleType]]
    """How the modules that stand in are made, by name. Empty where the binary is no module; then
    the stand-in is used once a module of :attr:`around` is imported."""
    python: str = ""
    """Top-level package of the library's Python code. The modules are answered for only where it
    is installed: what is not installed here is not installed on the cluster either."""
    distribution: str = ""
    """The package's name on the package index, for its version."""
    around: Mapping[str, Callable[[Any], AbstractContextManager[None]]] = field(
        default_factory=dict
    )
    """Modules of the Python code that load the binary when they are imported: they are executed
    within what this makes of the module."""

    @property
    def version(self) -> str:
        """Of the Python code; empty where that cannot be told."""
        try:
            return version(self.distribution) if self.distribution else ""
        except PackageNotFoundError:
            return ""


def from_file(file: StandInFile) -> StandIn:
    """The user's own stand-in; its kernels are named after the package of its module."""
    return StandIn(
        name=file.module,
        namespace=file.module.partition(".")[0],
        modules={file.module: lambda: _executed(file)},
    )


def _executed(file: StandInFile) -> ModuleType:
    spec = spec_from_file_location(file.module, file.path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--stand-in {file.path}: Python cannot import it; give a .py file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module_of(name: str, content: Mapping[str, Any], *, library: str) -> ModuleType:
    """A module ``name`` with ``content``; asking it for anything else names what is missing."""
    module = ModuleType(name, f"Stand-in of prismscale for {library}: nothing is computed.")
    module.__dict__.update(content)

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"prismscale's stand-in for {library} has no {name}.{attribute}. Give one of your own "
            f"that has it with --stand-in {name}=FILE.py (docs/null-device.md)"
        )

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module
