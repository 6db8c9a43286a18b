"""No kernel of a GPU, and no driver, is reached: on CPU builds of torch as on CUDA builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.null_program import null_program

KEYS = ("CUDA", "SparseCUDA", "SparseCsrCUDA", "QuantizedCUDA", "NestedTensorCUDA")
NOT_KERNELS = (
    *("registration.cpp", "c10d/Ops.cpp", "torch/_native/registry.py"),
    "prismscale/devices/null/flex/operators.py",
)
"""Where what may be registered for CUDA comes from: here, calls of process groups, Python."""

FAKE_DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static void note(const char* what) {
  FILE* log = fopen(getenv("FAKE_DRIVER_LOG"), "a");
  if (log) { fprintf(log, "%s\\n", what); fclose(log); }
}
int cuInit(unsigned flags) { note("cuInit"); return 100; }
int cuDriverGetVersion(int* version) { note("cuDriverGetVersion"); *version = 13020; return 0; }
int cuGetProcAddress_v2(const char* name, void** to, int v, unsigned long f, int* s) {
  note(name); *to = 0; return 500;
}
int nvmlInit_v2(void) { note("nvmlInit"); return 9; }
"""


def kernel_in_force(operator: str, key: str) -> str:
    """Where the kernel that a call reaches was registered."""
    rows = torch._C._dispatch_dump(operator).splitlines()
    return next(row for row in rows if row.startswith(f"{key}:"))


def test_no_operator_reaches_a_kernel_of_this_torch() -> None:
    """Of all operators of all libraries that have one for any kind of CUDA tensor."""
    reached = [
        (key, operator)
        for key in KEYS
        for operator in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if not any(place in kernel_in_force(operator, key) for place in NOT_KERNELS)
    ]
    assert reached == []


def test_sparse_tensors_are_refused() -> None:
    """They would be computed by kernels that are not there."""
    places, values = torch.tensor([[0], [1]], device="cuda"), torch.ones(1, device="cuda")
    with pytest.raises(NotImplementedError, match="SparseCUDA"):
        torch.sparse_coo_tensor(places, values, (2, 2))


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CUDA driver and an NVML that write down who calls them."""
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "driver.c"
    source.write_text(FAKE_DRIVER)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o"]
        subprocess.run([*command, str(folder / name)], check=True)
    return folder


def calls_of_driver(folder: Path, *python: str) -> list[str]:
    """What a Python with these arguments asked the driver."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    env = os.environ | {"LD_LIBRARY_PATH": str(folder), "FAKE_DRIVER_LOG": str(log)}
    subprocess.run([sys.executable, *python], env=env, capture_output=True, check=True)
    return log.read_text().split() if log.exists() else []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_driver_on_the_machine_is_left_alone(fake_driver: Path) -> None:
    """A real GPU is hidden and untouched: nobody so much as asks its driver."""
    if torch.version.cuda is not None and torch._C.__dict__.get("_cudart") is not None:
        # Otherwise an empty log would show nothing.
        assert calls_of_driver(fake_driver, "-c", "import torch; torch.cuda.is_available()")
    assert calls_of_driver(fake_driver, "-m", "prismscale.devices.null.self_test") == []


def test_what_python_implements_runs_as_it_is() -> None:
    """FSDP's copies, imported before the device is switched on: ATen's copies are what runs."""
    program = (
        "from support import op_log\n"
        "whole = torch.empty(2, 5, device='cuda')\n"
        "parts = [torch.empty(2, n, device='cuda') for n in (3, 2)]\n"
        "op_log.record_ops()\n"
        "torch.ops.fsdp.split_with_sizes_copy(whole, [3, 2], 1, out=parts)\n"
        "print(*[op.signature.name for op in op_log.drain_ops()])\n"
    )
    found = null_program(program, before="import torch.distributed.fsdp, torch")
    assert found.split() == ["aten::split_with_sizes_copy.out"]
