"""One rank of a real gloo job, timed and held between steps: a bench's counterpart of a live rank.

``python bench/real_rank.py SPEC`` runs the program of a live rank's spec under plain
``torch.distributed``; rank, world size and rendezvous come from the environment, as with torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from allocations import counted_peak_bytes
from gate import SocketGate
from prismscale.devices.cpu import CpuMemoryTracker
from prismscale.emulation.script import Script, StopProgram
from prismscale.emulation.step_detection import watch_steps
from prismscale.processes.children import die_with_parent


class Watch:
    """Times steps and passes the gate between them, as a live rank's control does."""

    def __init__(self, spec: dict[str, object], rank: int) -> None:
        self._gate = SocketGate(str(spec["gate"]), f"{spec.get('team', 'real')} {rank}")
        self._memory = CpuMemoryTracker()
        self._memory_marks = int(str(spec["memory_marks"]))
        self._prologue_marks = int(str(spec["prologue_marks"]))
        self._period = int(str(spec["period"]))
        self._last = self._prologue_marks + int(str(spec["steps"])) * self._period
        self._marks = 0
        self._began = 0
        self.step_ns: list[int] = []
        self.peak_bytes = 0

    def start(self) -> None:
        """The program begins."""
        self._memory.start()

    def optimizer_begins(self) -> None:
        """Nothing to note."""

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Note a step; stop after the last one."""
        now = time.perf_counter_ns()
        self._marks += 1
        if self._marks <= self._memory_marks:
            self._memory.step_ended()
        if self._marks == self._memory_marks:
            heard = self._memory.stop().peak_bytes
            counted = counted_peak_bytes()
            self.peak_bytes = heard if counted is None else counted
        since = self._marks - self._prologue_marks
        if since < 0 or since % self._period:
            return
        if self._began:
            self.step_ns.append(now - self._began)
        if self._marks >= self._last:
            raise StopProgram
        self._gate.hold()
        self._began = time.perf_counter_ns()


def main() -> None:
    """Run the program of the spec named on the command line."""
    die_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    watch = Watch(spec, rank)
    script = Script(target=spec["target"], args=tuple(spec["args"]))
    watch.start()
    with watch_steps(watch):
        script.run()
    out = Path(spec["out"]) / f"{spec.get('team', 'real')}-{rank}.json"
    out.write_text(json.dumps({"step_ns": watch.step_ns, "peak_bytes": watch.peak_bytes}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
