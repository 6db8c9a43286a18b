"""CUDA graphs that tests capture."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(run: Callable[[], object], **options: object) -> torch.cuda.CUDAGraph:
    """A graph of ``run``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):  # type: ignore[arg-type]
        run()
    return graph
