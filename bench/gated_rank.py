"""A live rank whose steps begin when a keeper says: ``gated_rank.py SPEC``, the socket in the
environment variable :data:`GATE`.

Benchmarks interleave the steps of a real and an emulated run. The time spent here is in nobody's
step.
"""

from __future__ import annotations

import os
import re
import sys

from gate import SocketGate
from prismscale.live import live_rank

GATE = "PRISMSCALE_BENCH_GATE"


class GatedControl(live_rank.LiveControl):
    """Holds the rank between two steps."""

    _gate: SocketGate | None = None

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Count; pass the gate at the end of a step."""
        super().optimizer_ended(optimizer)
        if not self.at_step_end:
            return
        if self._gate is None:
            found = re.search(r"live-(\d+)\.spec", sys.argv[1])
            self._gate = SocketGate(os.environ[GATE], f"live {found[1] if found else 0}")
        held = self.clock.now_ns()
        self._gate.hold()
        self.clock.forgive(self.clock.now_ns() - held)


if __name__ == "__main__":
    live_rank.LiveControl = GatedControl  # type: ignore[misc]
    sys.exit(live_rank.main(sys.argv[1:]))
