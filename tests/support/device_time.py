"""Logical time that a null device takes."""

from __future__ import annotations

from collections.abc import Callable

import torch


def device_ns(run: Callable[[], object]) -> int:
    """From the first launch of ``run`` to the end of its last on the current stream."""
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    return round(began.elapsed_time(ended) * 1e6)
