"""Steps that a program makes before it trains by CUDA graphs.

The first steps run without a graph, then one step captures a graph, and later steps replay it. A
replay does what the earlier steps did, but the host launches it at once, and the memory that the
capture allocated belongs to the graph. So all steps up to the capture are warm-up, however equal
they are; the steps after it repeat.
"""

from __future__ import annotations

from prismscale.devices.null.session import NullEmulation

LATEST = 6
"""Last step in which a capture ends the warm-up; a later capture is an event like any other.

Megatron-LM captures in the fourth step."""


class GraphWarmUp:
    """Notices graph captures on a null device; on other devices it reports none."""

    def __init__(self, emulation: NullEmulation | None) -> None:
        self._emulation = emulation
        self._n_graphs = emulation.n_graphs if emulation is not None else 0
        self._calls = 0

    def ended(self, calls: int, calls_per_step: int) -> bool:
        """Return whether the step of the latest of ``calls`` optimizer calls captured a graph.

        Then the program has to be examined anew. Captures after :data:`LATEST` steps do not count.
        """
        if self._emulation is None or self._emulation.n_graphs == self._n_graphs:
            return False
        self._n_graphs = self._emulation.n_graphs
        if calls > LATEST * calls_per_step:
            return False
        self._calls = calls
        return True

    def steps(self, calls_per_step: int) -> int:
        """Return how many steps are warm-up."""
        return -(-self._calls // calls_per_step)

    def is_to_come(self, steps: int) -> bool:
        """Return whether the program, after ``steps``, has prepared for a graph but captured none.

        It has prepared if it keeps random state that graphs can use.
        """
        emulation = self._emulation
        return self.may_come(steps) and emulation is not None and emulation.prepares_graphs

    def may_come(self, steps: int) -> bool:
        """Return whether a capture after ``steps`` would still be warm-up."""
        return self._emulation is not None and not self._calls and steps < LATEST
