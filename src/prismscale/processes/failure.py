"""How a rank's process tells its parent what went wrong, and which error the parent makes of it."""

from __future__ import annotations

import bdb
import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from prismscale.errors import (
    FormatError,
    GraphError,
    MismatchError,
    PrismscaleError,
    ScriptError,
    StorageError,
    StuckError,
    UsageError,
)
from prismscale.processes.children import Child, ending, flush_output

OURS = str(Path(__file__).parents[1])
FAILED = 3
"""Exit code of a rank process that left an error file."""
WAITED = (
    " (other ranks run at other times, or not at all: if the program waits for another rank's "
    "file, as some checkpoints do, switch that off for the run)"
)
"""Hint at a possible cause of a program's own timeout."""
SPEECHLESS = 74
"""Exit code of a rank process that could not write one (``EX_IOERR`` of ``sysexits.h``)."""


def save_failure(path: Path, rank: int, error: BaseException, *, echo: bool = True) -> int:
    """Describe ``error`` for the parent; return the exit code of this process.

    ``echo`` prints the traceback to this process's log too, unless the program chose to exit: then
    the program has said why.
    """
    text = "".join(traceback.format_exception(_without_our_frames(error)))
    own = isinstance(error, PrismscaleError)
    summary = str(error) if own else f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) and not own:
        summary += WAITED
    if isinstance(error, bdb.BdbQuit):
        summary = (
            "the debugger was left. (Only the live rank of --attach has a terminal; elsewhere "
            "breakpoint() does nothing, and pdb.set_trace() ends here)"
        )
    body = {"rank": rank, "ours": own, "kind": type(error).__name__}
    # If the error is a full disk, the log may lie on that disk; and the program may have closed it.
    with contextlib.suppress(Exception):
        if echo and not isinstance(error, SystemExit):
            print(text, file=sys.stderr)
    flush_output()
    # Write it whole or not at all, because the parent may look at any time.
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps({**body, "summary": summary, "traceback": text}))
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        return SPEECHLESS
    return FAILED


def load_failure(path: Path) -> dict[str, Any] | None:
    """Read what :func:`save_failure` wrote; None if there is nothing readable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def failure_of(child: Child, rank: int, error_path: Path, stage: str) -> PrismscaleError:
    """The error that a rank's process died of.

    ``rank`` is -1 for the assistants, which do not run the user's program.
    """
    found = load_failure(error_path)
    if rank < 0:
        kind = _OURS.get(found["kind"], PrismscaleError) if found else PrismscaleError
        said = found["summary"] if found and found["ours"] else child.log_tail(30)
        return kind(f"{child.name} failed during {stage}: {said}")
    code = child.process.wait()
    output = f"the end of its output ({child.log}):\n{child.log_tail()}"
    if code == SPEECHLESS and found is None:
        return StorageError(
            f"rank {rank} could not write to {error_path.parent} during {stage}: free some space "
            "there or choose another --out"
        )
    if found is None:
        how = f"{ending(code)} during {stage}, without a Python error"
        # A program that was ended by a signal has said nothing about it.
        said = child.log_tail() or ending(code) if code > 0 else ""
        return ScriptError(f"rank {rank} {how}; {output}", rank=rank, said=said)
    summary = str(found["summary"])
    if found["ours"]:
        who = f"rank {rank}"
        text = summary if summary.startswith(who) else f"{who}: {summary}"
        return _OURS.get(found["kind"], PrismscaleError)(text)
    if found["kind"] == SystemExit.__name__:
        return ScriptError(
            f"the program gave up on rank {rank} during {stage} ({summary}); {output}",
            rank=rank,
            said=child.log_tail(),
        )
    return ScriptError(
        f"the program failed on rank {rank} during {stage}: {summary}",
        rank=rank,
        traceback=found["traceback"],
        said=summary,
    )


def _without_our_frames(error: BaseException) -> BaseException:
    """Start the traceback at the user's first frame: how we started the program is noise."""
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith((OURS, "<frozen runpy>")) and "runpy" not in name:
            return error.with_traceback(frame)
        frame = frame.tb_next
    return error


_OURS: dict[str, type[PrismscaleError]] = {
    kind.__name__: kind
    for kind in (UsageError, GraphError, MismatchError, StuckError, FormatError, StorageError)
}
