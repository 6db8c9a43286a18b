"""``prismscale run --stand-in`` runs a program whose extension exists only as a CUDA binary."""

from __future__ import annotations

from pathlib import Path

from support.runs import prismscale, results

STAND_IN = """
from prismscale.devices.null.libraries import gemm, launch, memory


def project(x, weight):
    out = x.new_empty(x.shape[0], weight.shape[0])
    cost = gemm((1, x.shape[0], weight.shape[0], x.shape[1]))
    launch("my_kernels::project", cost, reads=[x, weight], writes=[out])
    return out


def scale_(x):
    launch("my_kernels::scale", memory("pointwise"), reads=[x], writes=[x])
"""
PROGRAM = """
import torch
import torch.distributed as dist
import my_kernels

dist.init_process_group("nccl")
weight = torch.nn.Parameter(torch.empty(4096, 4096, device="cuda"))
optimizer = torch.optim.SGD([weight])
for step in range(8):
    x = my_kernels.project(torch.empty(8192, 4096, device="cuda"), weight)
    my_kernels.scale_(x)
    weight.grad = torch.ones_like(weight)
    dist.all_reduce(weight.grad)
    optimizer.step()
"""


def test_an_extension_of_ones_own_is_costed_as_it_says(tmp_path: Path) -> None:
    """The report names it with its share; without the stand-in the program cannot be imported."""
    (tmp_path / "my_kernels.py").write_text(STAND_IN)
    program = tmp_path / "program"
    program.mkdir()
    (program / "train.py").write_text(PROGRAM)
    options = ("--device", "null", "--world-size", 2, "--samples", 1, "--out", tmp_path / "run")
    done = prismscale(
        "run", *options, "--stand-in", tmp_path / "my_kernels.py", program / "train.py"
    )
    assert done.code == 0, done.err
    assert "my_kernels (my_kernels):" in done.out

    found = results(tmp_path / "run")
    (stand_in,) = found["stand_ins"]
    assert stand_in["calls"] == 4, "two kernels on each of two ranks"
    assert stand_in["share"] > 0.5
    (product,) = [kernel for kernel in found["largest_kernels"] if "project" in kernel["signature"]]
    assert (product["kind"], product["source"]) == ("gemm", "modelled")
    assert found["unknown_operators"] == []


def test_a_stand_in_is_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    """On others the extension itself is imported."""
    (tmp_path / "my_kernels.py").write_text(STAND_IN)
    (tmp_path / "train.py").write_text(PROGRAM)
    done = prismscale(
        *("run", "--world-size", 2, "--stand-in", tmp_path / "my_kernels.py"),
        tmp_path / "train.py",
    )
    assert done.code == 2
    assert "--stand-in is of --device null" in done.err
