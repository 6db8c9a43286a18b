"""Stand-ins that replace the CUDA extensions of libraries on the null device.

A user's own stand-in (``--stand-in FILE.py``) needs only :func:`launch` and the cost functions.
"""

from prismscale.devices.null.libraries.launches import Cost, attention, gemm, launch, memory

__all__ = ["Cost", "attention", "gemm", "launch", "memory"]
