"""Keeps torch.compile from tracing the emulation's own frames.

torch's process groups and CUDA are C++, at which dynamo breaks a graph. Ours are Python: dynamo
would trace and compile a call to them from code that runs between two compiled regions (FSDP's
hooks in a model that is compiled as a whole). That takes long and ends some programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prismscale.emulation.after_import import Change

PACKAGE = Path(__file__).parents[1]
TRACED = PACKAGE / "devices" / "null" / "libraries"
"""Stand-ins for libraries' Python code. They are traced, as the libraries' own code is."""


def changes() -> dict[str, Change]:
    """Return the change to make in torch once it is imported."""
    return {"torch._dynamo.trace_rules": _skip_our_own}


def _skip_our_own(trace_rules: Any, undo: ExitStack) -> None:
    skipped = trace_rules.SKIP_DIRS
    before = list(skipped)
    skipped += map(str, _untraced(PACKAGE))
    trace_rules._recompile_re()

    def restore() -> None:
        skipped[:] = before
        trace_rules._recompile_re()

    undo.callback(restore)


def _untraced(folder: Path) -> Iterator[Path]:
    """Yield the files and folders of ``folder`` that are not traced."""
    for path in sorted(folder.iterdir()):
        if path in TRACED.parents:
            yield from _untraced(path)
        elif path != TRACED:
            yield path
