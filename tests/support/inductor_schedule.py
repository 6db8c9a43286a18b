"""What inductor schedules: its own record of the kernels that it is about to generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ScheduledKernel:
    """A node of the schedule that becomes one generated kernel."""

    name: str
    n_bytes: int
    """That the scheduler expects it to read and write."""


@contextmanager
def scheduled_kernels() -> Iterator[list[ScheduledKernel]]:
    """Filled with what is scheduled meanwhile; caches are left alone, so that all of it is."""
    from torch._inductor import config, graph, scheduler

    found: list[ScheduledKernel] = []
    generate = graph.GraphLowering.codegen

    def codegen(lowered: Any) -> Any:
        code = generate(lowered)
        for node in lowered.scheduler.nodes:
            if isinstance(node, (scheduler.SchedulerNode, scheduler.FusedSchedulerNode)):
                n_bytes = node.get_read_write_buffers_sizes()
                found.append(ScheduledKernel(name=node.get_name(), n_bytes=n_bytes))
        return code

    graph.GraphLowering.codegen = codegen  # type: ignore[method-assign]
    try:
        with config.patch(force_disable_caches=True):
            yield found
    finally:
        graph.GraphLowering.codegen = generate  # type: ignore[method-assign]
