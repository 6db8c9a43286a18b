"""A live rank whose steps begin when a keeper says: ``gated_rank.py SPEC``, the socket in the
environment variable :data:`GATE`.

Benchmarks interleave the steps of a real and an emulated run. The time spent here is in nobody's
step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gate import SocketGate
from prismscale.live import live_rank
from prismscale.live.live_spec import LiveSpec

GATE = "PRISMSCALE_BENCH_GATE"


class GatedControl(live_rank.LiveControl):
    """Holds the rank between two steps."""

    rank = 0
    _gate: SocketGate | None = None

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count; pass the gate at the end of a step."""
        super().optimizer_ended(optimizer)
        if not self.at_step_end:
            return
        if self._gate is None:
            self._gate = SocketGate(os.environ[GATE], f"live {self.rank}")
        held = self.clock.now_ns()
        self._gate.hold()
        self.clock.forgive(self.clock.now_ns() - held)


if __name__ == "__main__":
    GatedControl.rank = LiveSpec.load(Path(sys.argv[1])).rank
    live_rank.LiveControl = GatedControl  # type: ignore[misc]
    sys.exit(live_rank.main(sys.argv[1:]))
