"""Runs of a user's program, emulated and plain, on the GPU of this machine, one after the other.

Every run has processes of its own, so that each has its own CUDA context, allocator and exit. Their
output goes to files. If a process fails, the end of its output is part of the error.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prismscale.analysis.observation import Observation
from prismscale.analysis.result import LiveResult
from prismscale.cluster import Cluster
from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleError, UsageError
from prismscale.measure.gpu_figures import HeldFigures, PlainFigures, error_path
from prismscale.processes.children import Child, Children, ending
from prismscale.processes.failure import failure_of
from prismscale.program_arguments import USUAL_CLUSTER
from prismscale.progress import StageUpdate
from prismscale.report.folder import read_results
from prismscale.runfolder import RunFolder
from prismscale.typed_files import load_json

# These modules are started by name and not imported, because they need torch.
PLAIN_PROGRAM = "prismscale.measure.plain_program"
HELD_STREAMS = "prismscale.measure.held_streams"
LIVE_STEPS = 12
HOST = "127.0.0.1"
POLL_S = 0.1
TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedFigures:
    """Figures of an emulated run with rank 0 live."""

    live: LiveResult
    observed: Observation
    command_s: float
    """Time from the start of the command to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedFigures:
    """Figures of a run of the program on the null device, with world size 1."""

    step_ns: int
    kernel_ns: int
    """Time of all kernels of a step."""
    peak_bytes: int
    reserved_bytes: int


@dataclass(kw_only=True)
class GpuRuns:
    """Starts runs of one program. Each finished run advances the progress by one."""

    script: Script
    scratch: Path
    """Folder for the files of runs, which is removed afterwards."""
    logs: Path
    cluster: str
    """Preset with this GPU (:func:`preset_of`): target of runs, and the null device's GPU."""
    total: int = 0
    """Number of all runs, for :attr:`update`."""
    update: StageUpdate = field(default=lambda done, total: None)
    _done: int = 0

    def emulated(self, world_size: int) -> EmulatedFigures:
        """Run ``prismscale run`` with rank 0 live.

        Raises:
            PrismscaleError: the command failed; the message has the end of its output.
        """
        out = self.scratch / f"{self._done:02d}-emulated"
        began = time.monotonic()
        live = ["--device", "cuda", "--live", "0", "--steps", str(LIVE_STEPS)]
        self._command(out, world_size, live)
        command_s = time.monotonic() - began
        self._count()
        return emulated_figures(RunFolder(root=out), command_s)

    def plain(
        self, n_ranks: int, *, steps: int, count: bool = False, trace: bool = False
    ) -> list[PlainFigures]:
        """Run the program itself in ``n_ranks`` processes on this GPU; return the figures of each.

        Args:
            n_ranks: number of processes.
            steps: number of steps of each.
            count: whether to count operations.
            trace: whether to keep the profile of one rank's last steps beside the logs.

        Raises:
            ScriptError: a rank failed.
            UsageError: the program took fewer steps, or did not use the GPU.
        """
        options = ["--operations"] if count else []
        if trace:
            self.logs.mkdir(parents=True, exist_ok=True)
            options += ["--trace", str(self.logs / f"{self._done:02d}-plain.trace.json")]
        return self._ranks("plain", sys.executable, n_ranks, steps, options)

    def on_null(self, *, steps: int) -> PlainFigures:
        """Run the program on the null device and count operations; raises as :meth:`plain`."""
        options = ["--operations", "--null", self.cluster]
        (figures,) = self._ranks("null", sys.executable, 1, steps, options)
        return figures

    def predicted(self) -> PredictedFigures:
        """Run ``prismscale run --device null`` at world size 1; raises as :meth:`emulated`."""
        out = self.scratch / f"{self._done:02d}-predicted"
        self._command(out, 1, ["--device", "null"])
        self._count()
        return predicted_figures(RunFolder(root=out))

    def held(self) -> HeldFigures:
        """Measure how late held streams go on. The user's program takes no part in it.

        Raises:
            PrismscaleError: the process failed; the message has the end of its output.
        """
        out = self.scratch / f"{self._done:02d}-held.json"
        with Children() as children:
            words = children.shared_folder() / "words"
            command = [sys.executable, "-m", HELD_STREAMS, str(out), str(words)]
            children.start("the process that holds streams", command, self.logs / f"{out.stem}.log")
            wait_for_all(children, _command_failure)
        self._count()
        return load_json(HeldFigures, out, "streams that were held")

    def _ranks(
        self, kind: str, python: str, n_ranks: int, steps: int, options: Sequence[str]
    ) -> list[PlainFigures]:
        stem = f"{self._done:02d}-{kind}-rank"
        outs = [self.scratch / f"{stem}-{rank}.json" for rank in range(n_ranks)]

        def failure(child: Child) -> PrismscaleError:
            rank = int(child.name)
            return failure_of(child, rank, error_path(outs[rank]), f"a {kind} run")

        port = _free_port()
        with Children() as children:
            for rank, out in enumerate(outs):
                command = [python, "-m", PLAIN_PROGRAM, str(out), "--steps", str(steps), *options]
                command += ["--module"] if self.script.is_module else []
                children.start(
                    str(rank),
                    [*command, "--", self.script.target, *self.script.args],
                    self.logs / f"{out.stem}.log",
                    environment=rank_environment(rank, n_ranks, port),
                )
            wait_for_all(children, failure)
        self._count()
        figures = [load_json(PlainFigures, out, "a rank that ran plainly") for out in outs]
        for one in figures:
            refuse_incomparable(one, steps, self.script.label)
        return figures

    def _command(self, out: Path, world_size: int, options: Sequence[str]) -> None:
        """Run ``prismscale run`` with the program."""
        command = [sys.executable, "-m", "prismscale", "run", *options]
        command += ["--cluster", self.cluster]
        command += ["--world-size", str(world_size), "--out", str(out), *self._program()]
        with Children() as children:
            name = f"prismscale run --world-size {world_size}"
            children.start(name, command, self.logs / f"{out.name}.log")
            wait_for_all(children, _command_failure)

    def _program(self) -> list[str]:
        """Return the program as arguments of ``prismscale run``."""
        if self.script.is_module:
            return ["-m", self.script.target, *self.script.args]
        return [self.script.target, *self.script.args]

    def _count(self) -> None:
        self._done += 1
        self.update(self._done, self.total)


def emulated_figures(folder: RunFolder, command_s: float) -> EmulatedFigures:
    """Read the figures of a finished run with rank 0 live.

    Raises:
        UsageError: there is no finished run. FormatError: a file is damaged.
    """
    (live,) = read_results(folder).live
    path = next(folder.live.glob("*/live-0.json"))
    observed = load_json(Observation, path, "what was seen of a live rank")
    return EmulatedFigures(live=live, observed=observed, command_s=command_s)


def predicted_figures(folder: RunFolder) -> PredictedFigures:
    """Read the figures of a finished run of one rank on the null device.

    Raises as :func:`emulated_figures`."""
    found = read_results(folder)
    (stage,) = found.stages
    return PredictedFigures(
        step_ns=found.step_ns,
        kernel_ns=sum(kind.device_ns for kind in found.kernels),
        peak_bytes=stage.peak_bytes or 0,
        reserved_bytes=stage.reserved_bytes or 0,
    )


def preset_of(gpu: str) -> str:
    """Return the cluster preset whose GPU torch calls ``gpu``; without one, the usual preset."""
    return Cluster.presets_by_gpu().get(gpu, USUAL_CLUSTER)


def wait_for_all(children: Children, failure: Callable[[Child], PrismscaleError]) -> None:
    """Wait until all children have ended successfully.

    Raises:
        PrismscaleError: the ``failure`` of the first child that did not.
    """
    while True:
        for child in children.finished():
            if child.process.returncode != 0:
                raise failure(child)
        if not children.running:
            return
        time.sleep(POLL_S)


def rank_environment(rank: int, n_ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set; all ranks share the first GPU."""
    numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
    numbers["MASTER_PORT"] = port
    return {"MASTER_ADDR": HOST, **{name: str(number) for name, number in numbers.items()}}


def refuse_incomparable(figures: PlainFigures, steps: int, label: str) -> None:
    """Refuse a program that leaves nothing to compare.

    Raises:
        UsageError: the program ended before ``steps`` steps, or did not use the GPU.
    """
    if len(figures.step_ns) < steps - 1:
        raise UsageError(
            f"{label} ended before its {steps} optimizer steps were measured; give it arguments "
            "with which it takes more"
        )
    if figures.peak_bytes == 0:
        raise UsageError(
            f"{label} allocated nothing on the GPU; give a script, or arguments, that train on cuda"
        )


def _command_failure(child: Child) -> PrismscaleError:
    how = ending(child.process.returncode or 0)
    tail = child.log_tail(TAIL_LINES)
    return PrismscaleError(f"{child.name} {how}; the end of its output ({child.log}):\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
