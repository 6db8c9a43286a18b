"""Time to press a process out of the GPU and to bring it back, by the bytes that it holds there.

    python bench/gpu/freeze.py --json PATH

``cuCheckpointProcess*`` of the driver (CUDA 12.8 and newer): lock, checkpoint to host memory,
restore, unlock. It is what switching ranks on one GPU would cost.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from pathlib import Path

import torch
from timing import save

GIB = 1 << 30
SIZES_GIB = (0, 1, 4, 16)
CHILD = """
import sys, torch
x = torch.randn(max(1, int(float(sys.argv[1]) * 2**28)), device="cuda")
total = x.double().sum().item() if x.numel() < 2**29 else x[:1024].double().sum().item()
print("ready", flush=True)
sys.stdin.readline()
after = x.double().sum().item() if x.numel() < 2**29 else x[:1024].double().sum().item()
print("same" if after == total else "different", flush=True)
"""


class LockArguments(ctypes.Structure):
    """``CUcheckpointLockArgs``."""

    _fields_ = [("timeoutMs", ctypes.c_uint), ("reserved0", ctypes.c_uint)]
    _fields_ += [("reserved1", ctypes.c_uint64 * 7)]


def call(driver: ctypes.CDLL, name: str, pid: int, arguments: object = None) -> float:
    """Seconds of one driver call; raises RuntimeError with CUDA's error code."""
    function = getattr(driver, name)
    began = time.perf_counter()
    code = function(ctypes.c_int(pid), arguments)
    if code != 0:
        raise RuntimeError(f"{name} failed with CUDA error {code}")
    return time.perf_counter() - began


def measure(driver: ctypes.CDLL, gib: float) -> dict[str, object]:
    """One process with so much on the GPU, out and back three times."""
    command = [sys.executable, "-c", CHILD, str(gib)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            times: dict[str, list[float]] = {}
            for _ in range(3):
                for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
                    arguments = (
                        ctypes.byref(LockArguments(timeoutMs=10_000)) if name == "Lock" else None
                    )
                    took = call(driver, f"cuCheckpointProcess{name}", child.pid, arguments)
                    times.setdefault(f"{name.lower()}_s", []).append(took)
                    if name == "Checkpoint":
                        times.setdefault("used_bytes_while_out", []).append(used_bytes())
            child.stdin.write("\n")
            child.stdin.flush()
            return {"gib": gib, **times, "values": child.stdout.readline().strip()}
        finally:
            child.kill()


def used_bytes() -> int:
    """Of the GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    """Measure all; print and write each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.cuda.init()
    driver = ctypes.CDLL("libcuda.so.1")
    rows: list[object] = []
    for gib in SIZES_GIB:
        try:
            rows.append(measure(driver, gib))
        except (RuntimeError, AttributeError) as error:
            rows.append({"gib": gib, "failed": str(error)})
        print(rows[-1], flush=True)
        save(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
