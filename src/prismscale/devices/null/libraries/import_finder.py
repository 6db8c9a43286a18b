"""Answers imports of modules that exist only as CUDA binaries with stand-ins.

Nothing is imported here before the program imports it, and a library that the program does not use
leaves no trace.
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
    """Finds the modules of ``stand_ins``; later ones go before earlier ones."""

    def __init__(self, stand_ins: Iterable[StandIn]) -> None:
        self._makers: dict[str, StandIn] = {}
        self._around: dict[str, StandIn] = {}
        self._used: dict[str, StandIn] = {}
        self.add(stand_ins)

    def add(self, stand_ins: Iterable[StandIn]) -> None:
        """Find those of ``stand_ins``, too; where a module has one already, it gets the new one."""
        for stand_in in stand_ins:
            self._makers |= dict.fromkeys(stand_in.modules, stand_in)
            self._around |= dict.fromkeys(stand_in.around, stand_in)

    def begin(self) -> None:
        """Answer imports from now on."""
        sys.meta_path.insert(0, self)

    @property
    def used(self) -> tuple[StandIn, ...]:
        """Stand-ins that were imported, in this order."""
        return tuple(self._used.values())

    def explain_missing(self, error: ModuleNotFoundError) -> None:
        """Add to ``error`` what helps, where it is about the Python code of a stand-in's library:
        its installer may want a CUDA compiler."""
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
        """A module of a stand-in whose library is here, or one that is executed around its own
        loading of the binary."""
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
        """The module ``name``; its stand-in is used from now on."""
        self._used[stand_in.name] = stand_in
        return stand_in.modules[name]()


class _Maker(Loader):
    """Makes a stand-in's module."""

    def __init__(self, finder: StandInFinder, stand_in: StandIn) -> None:
        self._finder = finder
        self._stand_in = stand_in

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._finder.make(spec.name, self._stand_in)

    def exec_module(self, module: ModuleType) -> None:
        """It is made whole."""


def _is_here(package: str) -> bool:
    """Whether ``package`` can be imported; the empty name always can."""
    if not package or package in sys.modules:
        return True
    return importlib.util.find_spec(package) is not None
