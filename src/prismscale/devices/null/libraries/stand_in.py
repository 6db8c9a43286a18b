"""Description of a stand-in for a library, and functions that make its modules."""

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
    """Replacement on the null device for the modules of a library that exist only as CUDA binaries.

    The library's own Python code runs unmodified on top of it.
    """

    name: str
    """Name of the library in reports."""
    namespace: str
    """Namespace of its kernels: ``transformer_engine`` in ``transformer_engine::layernorm_fwd``."""
    modules: Mapping[str, Callable[[], ModuleType]]
    """Functions that make the replacement modules, by module name. Empty if the binary is not a
    module; the stand-in then counts as used once a module of :attr:`around` is imported."""
    python: str = ""
    """Top-level package of the library's Python code. The modules are replaced only where it is
    installed: what is not installed here is not installed on the cluster either."""
    distribution: str = ""
    """The package's name on the package index, from which :attr:`version` is found."""
    around: Mapping[str, Callable[[Any], AbstractContextManager[None]]] = field(
        default_factory=dict
    )
    """For modules of the Python code that load the binary on import: functions, by module name,
    that get the module and return the context manager within which it is executed."""

    @property
    def version(self) -> str:
        """Version of the Python code; empty if it cannot be found."""
        try:
            return version(self.distribution) if self.distribution else ""
        except PackageNotFoundError:
            return ""


def from_file(file: StandInFile) -> StandIn:
    """Return the stand-in of a user's file.

    Its kernels are named after the top-level package of its module.
    """
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
    """Return a module ``name`` with ``content``.

    Access to any other attribute raises an AttributeError that names it.
    """
    module = ModuleType(name, f"Stand-in of prismscale for {library}: nothing is computed.")
    module.__dict__.update(content)

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"prismscale's stand-in for {library} has no {name}.{attribute}. Give one of your own "
            f"that has it with --stand-in {name}=FILE.py (docs/null-device.md)"
        )

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module
