"""Import finder that answers imports of CUDA extension modules with stand-ins.

It imports nothing before the program does, and a library that the program does not use leaves no
trace.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from prismscale.devices.null.custom_kernels import spec_executed_within
from prismscale.devices.null.libraries.stand_in import StandIn


class StandInFinder(MetaPathFinder):
    """Finds the modules of ``stand_ins``; if two have the same module, the later one counts."""

    def __init__(self, stand_ins: Iterable[StandIn]) -> None:
        self._makers: dict[str, StandIn] = {}
        self._around: dict[str, StandIn] = {}
        self._used: dict[str, StandIn] = {}
        self.add(stand_ins)

    def add(self, stand_ins: Iterable[StandIn]) -> None:
        """Also find the modules of ``stand_ins``, which replace earlier stand-ins for a module."""
        for stand_in in stand_ins:
            self._makers |= dict.fromkeys(stand_in.modules, stand_in)
            self._around |= dict.fromkeys(stand_in.around, stand_in)

    def begin(self) -> None:
        """Answer imports from now on."""
        sys.meta_path.insert(0, self)

    @property
    def used(self) -> tuple[StandIn, ...]:
        """Stand-ins that the program imported, in the order of their first import."""
        return tuple(self._used.values())

    def explain_missing(self, error: ModuleNotFoundError) -> None:
        """Add a hint to ``error`` if it is about the Python code of a stand-in's library.

        That code may be missing because the library's installer wants a CUDA compiler.
        """
        missing = (error.name or "").partition(".")[0]
        makers = {s.python: s for s in (*self._makers.values(), *self._around.values())}
        stand_in = makers.get(missing) if missing else None
        if stand_in is not None:
            error.add_note(
                f"The null device answers for {stand_in.name}'s CUDA code; its Python code has to "
                'be installed. It needs no CUDA compiler: docs/null-device.md, "Libraries that '
                'are CUDA binaries", says how'
            )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in's module, or of a module that loads the binary on import.

        A stand-in's module is found only if the library's Python code is installed.
        """
        stand_in = self._makers.get(fullname)
        if stand_in is not None and _is_here(stand_in.python):
            return ModuleSpec(fullname, _Maker(self, stand_in), is_package=False)
        if fullname in self._around:
            stand_in = self._around.pop(fullname)
            if not stand_in.modules:
                self._used[stand_in.name] = stand_in
            return spec_executed_within(fullname, stand_in.around[fullname])
        return None

    def make(self, name: str, stand_in: StandIn) -> ModuleType:
        """Return the module ``name``; its stand-in counts as used from now on."""
        self._used[stand_in.name] = stand_in
        return stand_in.modules[name]()


class _Maker(Loader):
    """Loader that makes a stand-in's module."""

    def __init__(self, finder: StandInFinder, stand_in: StandIn) -> None:
        self._finder = finder
        self._stand_in = stand_in

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._finder.make(spec.name, self._stand_in)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: :meth:`create_module` returns a complete module."""


def _is_here(package: str) -> bool:
    """Return whether ``package`` can be imported; the empty name always can."""
    if not package or package in sys.modules:
        return True
    return importlib.util.find_spec(package) is not None
