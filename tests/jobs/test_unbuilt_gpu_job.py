"""A job on a GPU that is not built: a preset, and a file that says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import Ended, prismscale, results

WORLD = 8
PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
properties = torch.cuda.get_device_properties(0)
print(torch.cuda.device_count(), properties.name, properties.multi_processor_count, flush=True)
layer = torch.nn.Linear(8192, 8192, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(8):
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.gelu(layer(x)).sum().backward()
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
NEXT = """
base = "b200"
name = "next"
devices_per_node = 4
nics_per_node = 4
nodes_per_nvlink_domain = 2

[device]
name = "NVIDIA Next"
scaled_from = "b200"
memory_bandwidth_bytes_per_s = 16e12
multiprocessors = 200
peak_flops = { bfloat16 = 4.5e15 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program and the file, and a run with each of the two clusters."""
    root = tmp_path_factory.mktemp("unbuilt")
    (root / "train.py").write_text(PROGRAM)
    (root / "next.toml").write_text(NEXT)
    for cluster in ("b200", "next"):
        done = ran(root, cluster)
        assert done.code == 0, done.err
    return root


def ran(root: Path, cluster: str) -> Ended:
    """``prismscale run`` with the preset or the file."""
    where = cluster if cluster == "b200" else root / f"{cluster}.toml"
    options = ("--device", "null", "--world-size", WORLD, "--cluster", where)
    return prismscale("run", *options, "--out", root / cluster, root / "train.py")


def test_a_program_sees_the_gpu_that_the_file_describes(folder: Path) -> None:
    """Its name, its multiprocessors, and how many a node has."""
    (log, *_) = sorted((folder / "next" / "logs").rglob("*.log"))
    assert "4 NVIDIA Next 200" in log.read_text()


def test_all_of_the_file_makes_the_step(folder: Path) -> None:
    """Twice the peak and bandwidth, and no network between the nodes."""
    now, then = (results(folder / name)["step_ns"] for name in ("b200", "next"))
    assert then < 0.7 * now


def test_a_forecast_on_the_file_is_the_run_on_it(folder: Path) -> None:
    """Kernels and communication costed anew, without another capture."""
    options = ("--cluster", folder / "next.toml", "--variability", "none", "--draws", 8)
    done = prismscale("forecast", folder / "b200", *options)
    assert done.code == 0, done.err
    told = json.loads((folder / "b200" / "results.json").read_text())
    found = told["forecast"]["step"]["step_without_variation_ns"]
    assert found == results(folder / "next")["step_ns"]
