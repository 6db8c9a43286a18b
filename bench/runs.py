"""Programs that benches run through ``prismscale``, and the folder in which they run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismscale.analysis.result import RunResult
from prismscale.analysis.step_error import step_error
from prismscale.errors import NoFitError
from prismscale.graph.io import load_graph, load_trace
from prismscale.graph.trace import MemoryRecord
from prismscale.runfolder import RunFolder
from prismscale.validation.rows import Row
from prismscale.validation.steps.measured import cluster_of_family
from prismscale.validation.steps.price_version import price_version
from prismscale.validation.steps.recorded_step import Provenance

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
TITAN = EXAMPLES / "torchtitan" / "train.py"
PARTIAL = ("--parallelism.spmd_backend", "partial_dtensor", "--training.disable_cuda_graphs")
"""Of torchtitan 0.3.0, which torch 2.13 asks for."""
MEDIAN_STEP = "forecast's median step"
"""How the row ends of the step that a run shows."""
NOT_DONE = 124
"""Exit code of a command that ran into its limit."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program at one world size."""

    name: str
    package: str
    """That it needs beside prismscale."""
    world_size: int
    script: Path | str
    """A file, or the name of a module."""
    args: tuple[str, ...]

    @property
    def command(self) -> tuple[object, ...]:
        """As behind ``torchrun``."""
        module = ("-m",) if isinstance(self.script, str) else ()
        return (*module, self.script, *self.args)

    @property
    def is_installed(self) -> bool:
        """Whether this Python has the package; says so where not."""
        if is_installed(self.package):
            return True
        print(f"left out, {self.package} is not installed: {self.name}")
        return False


class Runs:
    """Runs commands in one folder; a run with the same arguments is made once."""

    def __init__(
        self, folder: Path, *, limit_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        """``environment`` is added to this process's own."""
        self.folder = folder
        self._limit_s = limit_s
        self._environment = environment or {}
        self.reason = ""
        """Why the last run failed: the end of what it said."""

    def run(self, out: str, options: Sequence[object], script: Sequence[object]) -> dict[str, Any]:
        """``prismscale run``; its results, empty where it failed."""
        told = self.folder / out / "results.json"
        return self._told("run", told, (*options, "--out", told.parent, *script), (0,))

    def fit(self, out: str, options: Sequence[object], script: Sequence[object]) -> dict[str, Any]:
        """``prismscale fit``; what it found, whether the job fits or not, empty where it failed."""
        told = self.folder / f"{out}.json"
        command = (*options, "--out", self.folder / out, "--json", told, *script)
        return self._told("fit", told, command, (0, NoFitError.exit_code))

    def _told(
        self, command: str, told: Path, arguments: Sequence[object], good: Sequence[int]
    ) -> dict[str, Any]:
        """What ``command`` has written to ``told``; exit codes other than ``good`` are failures."""
        if not told.exists():
            done = self.command(command, *arguments)
            if done.returncode not in good:
                print(f"{command}, {told}:", done.stderr[-3000:], sep="\n", file=sys.stderr)
                self.reason = next(filter(None, reversed(done.stderr.splitlines())), "")
                return {}
        found: dict[str, Any] = json.loads(told.read_text())
        return found

    def null(
        self, out: str, world_size: int, script: Sequence[object], *more: object
    ) -> dict[str, Any]:
        """On null H100s."""
        fixed = ("--device", "null", "--cluster", "h100-sxm", "--world-size", world_size)
        return self.run(out, (*fixed, *more), script)

    def command(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """One command."""
        command = [sys.executable, "-m", "prismscale", *map(str, arguments)]
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                env={**os.environ, **self._environment},
                timeout=self._limit_s,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            late = f"not done after {self._limit_s:g} s"
            return subprocess.CompletedProcess(command, NOT_DONE, stdout="", stderr=late)


def memory_by_rank(out: Path, captured: Sequence[int]) -> dict[int, MemoryRecord]:
    """Of every rank of the run in ``out``: its own, or that of a captured rank of its class."""
    newest = max(out.glob("captures/*"), key=lambda path: path.stat().st_mtime)
    memory = {rank: load_trace(newest / f"rank-{rank}.parquet").memory for rank in captured}
    own = {rank: record for rank, record in memory.items() if record is not None}
    class_of_R = load_graph(RunFolder(root=out).graph).class_of_R
    by_class = {int(class_of_R[rank]): record for rank, record in own.items()}
    return {r: own.get(r, by_class[int(c)]) for r, c in enumerate(class_of_R)}


def our_commit() -> str:
    """Of this clone; marked where a file differs from it, rows that a bench writes apart."""
    here = ("git", "-C", str(Path(__file__).parent))
    named = subprocess.run(
        (*here, "describe", "--always"), capture_output=True, text=True, check=False
    )
    same = subprocess.run(
        (*here, "diff", "--quiet", "HEAD", "--", ":/", ":(exclude,top)bench/results"), check=False
    )
    return named.stdout.strip() + ("-dirty" if same.returncode else "")


def provenance(found: Mapping[str, Any], family: str, gpu: str) -> str:
    """The note of a step's row: its error bar, and what prices and which commit predicted it.

    ``found`` is what the run told; ``gpu`` names kernels that a family's programs run.
    """
    bar = step_error(RunResult.from_json(found))
    prices = price_version(cluster_of_family(family, gpu), gpu)
    return Provenance(bar=bar, prices=prices, commit=our_commit()).note()


def median_row(name: str, found: Mapping[str, Any]) -> list[Row]:
    """The median of the forecast that comes with a run; nothing where none was drawn."""
    spread = found.get("spread")
    return [Row.told(f"{name}: {MEDIAN_STEP}", spread["p50_ns"] / 1e6, "ms")] if spread else []


def is_installed(package: str) -> bool:
    """Whether this Python could import it."""
    return importlib.util.find_spec(package) is not None


def folder_name(text: str) -> str:
    """A name for a folder."""
    return "-".join("".join(c if c.isalnum() else " " for c in text).split())
