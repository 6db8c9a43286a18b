"""Runs of the command line for tests: a tiny trainer, its runs, and what they leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from prismscale.cli import main

TRAINER = '''
"""A file beside it makes a rank fail: "fail-<rank>"."""
import pathlib

import torch
import torch.distributed as dist

from marker import step_ends

dist.init_process_group("gloo")
rank, here = dist.get_rank(), pathlib.Path(__file__).parent
for step in range(50):
    torch.ones(64, 64) @ torch.ones(64, 64)
    met = torch.full((2,), float(rank + 1))
    dist.all_reduce(met)
    if (here / f"fail-{rank}").exists() and step == 4:
        raise ValueError("bad batch")
    print("together", met[0].item(), flush=True)
    step_ends()
dist.destroy_process_group()
'''

FEW = (
    *("--samples", "2", "--steps", "3", "--clock", "virtual", "--no-memory"),
    *("--step-marker", "marker:step_ends"),
)
"""Options of a short run. With a marker nobody needs an optimizer: importing one takes seconds."""
MARK = "PRISMSCALE_TEST_RUN"
"""Environment variable by which processes of one run are found."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def write_program(folder: Path, text: str = TRAINER, name: str = "train.py") -> Path:
    """A script of its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "marker.py").write_text("def step_ends():\n    pass\n")
    path = folder / name
    path.write_text(text)
    return path


def command(*args: object) -> list[str]:
    """``prismscale ARGS`` in this environment."""
    return [sys.executable, "-m", "prismscale", *map(str, args)]


def environment(mark: str = "") -> dict[str, str]:
    """Ours, with the package to be found, one thread and a mark."""
    source = str(Path(__file__).parents[2] / "src")
    return {
        **os.environ,
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }


def prismscale(*args: object) -> Ended:
    """Run ``prismscale ARGS`` in this process (its ranks are processes as always)."""
    out, err = io.StringIO(), io.StringIO()
    argv, handlers = sys.argv, {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = ["prismscale", *map(str, args)]
    code: Any = 0
    try:
        # Wide, so that no path is broken.
        wide = patch.dict(os.environ, COLUMNS="300")
        with wide, redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(int(code or 0), out.getvalue(), err.getvalue())


def run_job(out: Path, world_size: int, *args: object) -> Ended:
    """``prismscale run`` with few steps."""
    return prismscale("run", "--world-size", world_size, "--out", out, *FEW, *args)


def results(out: Path) -> dict[str, Any]:
    """``results.json`` of a run folder."""
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether something becomes true within a while."""
    for _ in range(2_000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_running(mark: str, patience_s: float = 20.0) -> list[str]:
    """Command lines of processes of a run that are still there after a while."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [line for p in psutil.process_iter() if (line := _line_of(p, mark))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _line_of(process: psutil.Process, mark: str) -> str:
    """The end of the command line of a process of the run; nothing of others."""
    # It may end between one look and the next.
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
            return " ".join(process.cmdline()[-2:])
    return ""
