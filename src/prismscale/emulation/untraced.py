"""Frames that torch.compile leaves alone: the emulation's own.

torch's process groups and CUDA are C++, at which dynamo breaks a graph. Ours are Python: a call
from code that runs between two compiled regions (FSDP's hooks of a model that is compiled as a
whole) would be traced and compiled itself, which takes long and ends some programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prismscale.emulation.after_import import Change

PACKAGE = Path(__file__).parents[1]
TRACED = PACKAGE / "devices" / "null" / "libraries"
"""Stand-ins for libraries' Python, which is traced as theirs is."""


def changes() -> dict[str, Change]:
    """What to change in torch once it is imported."""
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
    """Files and folders of ``folder`` without what is traced."""
    for path in sorted(folder.iterdir()):
        if path in TRACED.parents:
            yield from _untraced(path)
        elif path != TRACED:
            yield path
