"""Libraries that exist only beside a GPU, answered for on the null device.

A stand-in of one's own (``--stand-in FILE.py``) needs :func:`launch` and the costs alone.
"""

from prismscale.devices.null.libraries.launches import Cost, attention, gemm, launch, memory

__all__ = ["Cost", "attention", "gemm", "launch", "memory"]
