"""Peak memory of a real rank, independently of what an emulated one is measured with.

torch's profiler does not hear what gloo's threads free. :func:`build_counter` compiles a library
that counts every allocation and free of torch's CPU allocator, from every thread; the dynamic
linker puts it in front of torch's own functions.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("allocations.cpp")


def build_counter(folder: Path) -> dict[str, str]:
    """Compile into ``folder``; returns the environment of the processes to count in."""
    library = folder / "allocations.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)]
    subprocess.run([*command, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def counted_peak_bytes() -> int | None:
    """Peak of this process so far; None where nobody counts."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "peak_bytes"):
        return None
    process.peak_bytes.restype = ctypes.c_int64
    return int(process.peak_bytes())
