"""``prismscale run --kernels`` and ``--fused`` reach the kernels of a job."""

from __future__ import annotations

from pathlib import Path

from prismscale.cost.kernel_measured import KernelTable, MeasuredKernel
from support.runs import prismscale, results

PROGRAM = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(2048, 2048, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for step in range(8):
    loss = torch.nn.functional.gelu(model(torch.randn(4096, 2048, device="cuda"))).sum()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
"""
MS = 1_000_000


def test_a_job_takes_the_prices_that_it_is_given(tmp_path: Path) -> None:
    """A measured product of 50 ms in every step, and elementwise work of a compiler's kernels."""
    (tmp_path / "train.py").write_text(PROGRAM)
    product = MeasuredKernel(signature="aten::addmm", device_ns=50 * MS, host_ns=9, spread=0.1)
    KernelTable(device="NVIDIA H100 80GB HBM3", torch="2", date="2026", kernels=(product,)).save(
        tmp_path / "kernels.json"
    )
    options = ("--device", "null", "--world-size", 2, "--samples", 1, "--out", tmp_path / "run")
    given = ("--kernels", tmp_path / "kernels.json", "--fused")
    done = prismscale("run", *options, *given, tmp_path / "train.py")
    assert done.code == 0, done.err

    found = results(tmp_path / "run")
    assert found["step_ns"] > 50 * MS
    assert "measured" in {kernel["source"] for kernel in found["kernels"]}
    (largest, *_) = found["largest_kernels"]
    assert largest["signature"].startswith("aten::addmm")
    assert found["unknown_operators"] == []
