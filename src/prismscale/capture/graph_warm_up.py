"""Steps that a program makes before it trains by CUDA graphs.

Some steps are made without, one captures a graph, and from then on it is replayed. A replay does
what the steps before did, but the host launches it at once, and what the capture allocated is the
graph's own. So all steps until the capture are warm-up, however equal they are; what comes behind
it repeats.
"""

from __future__ import annotations

from prismscale.devices.null.session import NullEmulation

LATEST = 6
"""Steps after which a capture is an event like any other. Megatron-LM captures in the fourth."""


class GraphWarmUp:
    """Notices captures on a null device; elsewhere there are none."""

    def __init__(self, emulation: NullEmulation | None) -> None:
        self._emulation = emulation
        self._n_graphs = emulation.n_graphs if emulation is not None else 0
        self._calls = 0

    def ended(self, calls: int, calls_per_step: int) -> bool:
        """Whether a graph was captured in the step that the latest of ``calls`` optimizer calls is
        in, and the program is to be looked at anew."""
        if self._emulation is None or self._emulation.n_graphs == self._n_graphs:
            return False
        self._n_graphs = self._emulation.n_graphs
        if calls > LATEST * calls_per_step:
            return False
        self._calls = calls
        return True

    def steps(self, calls_per_step: int) -> int:
        """How many steps are warm-up."""
        return -(-self._calls // calls_per_step)

    def is_to_come(self, steps: int) -> bool:
        """Whether the program, after ``steps``, has made ready for a graph and captured none: it
        keeps random state that graphs can take up."""
        emulation = self._emulation
        return self.may_come(steps) and emulation is not None and emulation.prepares_graphs

    def may_come(self, steps: int) -> bool:
        """Whether a capture after ``steps`` would still be warm-up."""
        return self._emulation is not None and not self._calls and steps < LATEST
