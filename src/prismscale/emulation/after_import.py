"""Changes modules that the program may import at any time.

Checkpoint libraries are large, and most programs import none of them. So a module that is already
loaded is changed at once. Any other is changed right after its own code has run, before other code
can take a name from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[Any, ExitStack], None]
"""Changes a module, and pushes onto the stack the callbacks that restore it."""


@contextmanager
def changed(changes: Mapping[str, Change]) -> Iterator[None]:
    """While the block runs, change the modules named in ``changes``, whenever they are imported."""
    with ExitStack() as undo:
        for name, change in changes.items():
            if name in sys.modules:
                change(sys.modules[name], undo)
        watcher = _Watcher(changes, undo)
        sys.meta_path.insert(0, watcher)
        undo.callback(sys.meta_path.remove, watcher)
        yield


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of a module or class until ``undo`` closes; return its old value."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    undo.callback(setattr, owner, name, before)
    return before


class _Watcher(MetaPathFinder):
    """A meta path finder that finds nothing itself: it changes what the other finders find."""

    def __init__(self, changes: Mapping[str, Change], undo: ExitStack) -> None:
        self._changes, self._undo = changes, undo
        self._searched = ""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that makes the change at its end."""
        change = self._changes.get(fullname)
        if change is None or fullname == self._searched:
            return None
        # The finders may include another watcher, which asks this one again.
        self._searched = fullname
        try:
            found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._searched = ""
        if spec is not None and spec.loader is not None:
            self._change_after(spec.loader, change)
        return spec

    def _change_after(self, loader: Any, change: Change) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module, self._undo)

        loader.exec_module = exec_module
