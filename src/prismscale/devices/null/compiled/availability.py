"""Whether compiled regions can be lowered on this machine.

The command line asks, so this module imports neither torch nor Triton.
"""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Return whether Triton is installed.

    Inductor imports it to generate kernels for GPUs. CPU builds of torch come without it.
    """
    return find_spec("triton") is not None
