"""Runs the live stage: one coordinator, one process for each live rank, all ended together."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismscale.capture.launcher import failure_of
from prismscale.errors import PrismscaleError, StuckError
from prismscale.graph.assemble import assemble
from prismscale.graph.groups import GroupTable
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.store import save_graph, save_trace
from prismscale.live.spec import LiveSpec
from prismscale.processes import Child, Children

POLL_S = 0.05
LogLine = Callable[[int, str], None]
"""``(rank, line)`` of a live rank's own output."""


@dataclass(frozen=True, kw_only=True)
class LiveStage:
    """What live ranks run against."""

    spec: LiveSpec
    """The job; rank, trace and socket are filled in for each live rank."""
    folder: Path
    logs: Path
    cluster: str
    slow: Mapping[int, float]
    hang: Mapping[int, int]
    compute_scale: float = 1.0

    def run(self, graph: JobGraph, on_line: LogLine, on_step: Callable[[int], None]) -> list[Any]:
        """Run all live ranks to the end; returns their observations (``live-<r>.json``), by rank.

        Raises:
            ScriptError: the program failed on a live rank.
            StuckError: the job hangs.
        """
        shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
        exchange = Path(tempfile.mkdtemp(prefix="prismscale-", dir=shared))
        try:
            with Children() as children:
                self._start(children, graph, exchange, on_line)
                self._watch(children, on_step)
        finally:
            shutil.rmtree(exchange, ignore_errors=True)
        return [json.loads(self._for(r, exchange).result_path.read_text()) for r in self.spec.live]

    def _for(self, rank: int, exchange: Path) -> LiveSpec:
        fields = {name: getattr(self.spec, name) for name in LiveSpec.__dataclass_fields__}
        fields.update(
            rank=rank,
            exchange=str(exchange),
            socket=str(exchange / "coordinator"),
            trace=str(self.folder / f"trace-{rank}.parquet"),
        )
        return LiveSpec(**fields)

    def _start(self, children: Children, graph: JobGraph, exchange: Path, on_line: LogLine) -> None:
        save_graph(graph, self.folder / "graph")
        coordinator = self.folder / "coordinator.json"
        coordinator.write_text(
            json.dumps(
                {
                    "graph": str(self.folder / "graph"),
                    "cluster": self.cluster,
                    "live": list(self.spec.live),
                    "slow": {str(r): f for r, f in self.slow.items()},
                    "hang": {str(r): s for r, s in self.hang.items()},
                    "compute_scale": self.compute_scale,
                    "socket": str(exchange / "coordinator"),
                }
            )
        )
        module = [sys.executable, "-m"]
        children.start(
            "coordinator",
            [*module, "prismscale.live.coordinator", str(coordinator)],
            self.logs / "coordinator.log",
        )
        for rank in self.spec.live:
            spec = self._for(rank, exchange)
            rank_class = graph.classes[int(graph.class_of_R[rank])]
            save_trace(rank_class.trace, Path(spec.trace))
            path = self.folder / f"live-{rank}.spec.json"
            spec.save(path)
            log = self.logs / f"live-rank-{rank}.log"
            child = children.start(
                str(rank), [*module, "prismscale.live.rank_process", str(path)], log
            )
            _follow(child, rank, on_line)

    def _watch(self, children: Children, on_step: Callable[[int], None]) -> None:
        left = set(self.spec.live)
        while left:
            time.sleep(POLL_S)
            for child in children.finished():
                code = child.process.returncode
                if child.name == "coordinator":
                    if code != 0:
                        raise PrismscaleError(f"the coordinator failed:\n{child.log_tail(30)}")
                    continue
                if code != 0:
                    raise self._failure(child)
                left.discard(int(child.name))
                on_step(len(self.spec.live) - len(left))

    def _failure(self, child: Child) -> PrismscaleError:
        rank = int(child.name)
        path = self.folder / f"live-{rank}.error.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("kind") == "StuckError":
            return StuckError(f"live rank {rank} waits for ever: {found['summary']}")
        return failure_of(child, rank, path, "the live run")


def isolate(
    graph_inputs: tuple[Mapping[int, Any], Any, GroupTable], live: tuple[int, ...]
) -> JobGraph:
    """The job's graph with every live rank in a class of its own."""
    traces, representative_R, groups = graph_inputs
    return assemble(traces, representative_R, groups, alone=live)


def _follow(child: Child, rank: int, on_line: LogLine) -> None:
    """Pass a child's log on line by line while it runs (a daemon thread: it ends with us)."""

    def read() -> None:
        with child.log.open(errors="replace") as log:
            while True:
                line = log.readline()
                if line:
                    on_line(rank, line.rstrip("\n"))
                elif child.process.returncode is not None:
                    return
                else:
                    time.sleep(POLL_S)

    threading.Thread(target=read, daemon=True).start()
