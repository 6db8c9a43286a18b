"""Whether compiled regions can be lowered here; imports nothing, because the command line asks."""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Inductor generates Triton kernels for GPUs, and imports it for that; CPU builds of torch come
    without."""
    return find_spec("triton") is not None
