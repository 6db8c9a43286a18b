"""What-ifs beside the program that was really changed so, on the null device: to the nanosecond."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prismscale.cluster import Calibration, Cluster
from support.runs import Ended, prismscale, results

WORLD = 4
PER_NODE = 2
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

names = ("tp", "dp") if "tp-first" in sys.argv else ("dp", "tp")
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=names)
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=tp)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = Reduced.apply(torch.nn.functional.gelu(layer(x)))
        return x

blocks = torch.nn.ModuleList(Block() for _ in range(3)).cuda()
optimizer = torch.optim.SGD(blocks.parameters())
reduced = []

def reduce(parameter):
    work = dist.all_reduce(parameter.grad, group=dp, async_op=True)
    if "blocking" in sys.argv:
        work.wait()
    else:
        reduced.append(work)

for parameter in blocks.parameters():
    parameter.register_post_accumulate_grad_hook(reduce)
for step in range(10):
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for block in blocks:
        x = block(x) if "kept" in sys.argv else checkpoint(block, x, use_reentrant=True)
    x.sum().backward()
    for work in reduced:
        work.wait()
    reduced.clear()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, captured as it is, and a cluster with another network."""
    root = tmp_path_factory.mktemp("what-if")
    (root / "train.py").write_text(PROGRAM)
    h100 = Cluster.load("h100-sxm")
    nodes = replace(h100, devices_per_node=PER_NODE, nics_per_node=PER_NODE)
    link = h100.inter_node
    slow = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 4)
    (root / "nodes.toml").write_text(nodes.to_toml())
    (root / "slow.toml").write_text(replace(nodes, inter_node=slow).to_toml())
    factors = Calibration(kernels=0.5, host=4.0, host_error=0.3, steps=2)
    calibrated = replace(nodes, device=replace(h100.device, calibration=factors))
    (root / "calibrated.toml").write_text(calibrated.to_toml())
    step_of(root)
    return root


def ran(
    root: Path,
    out: str,
    *options: object,
    program: Sequence[str] = (),
    cluster: str = "nodes",
) -> Ended:
    """``prismscale run``."""
    where = ("--device", "null", "--world-size", WORLD, "--cluster", root / f"{cluster}.toml")
    more = ("--steps", 3, "--out", root / out, *options)
    return prismscale("run", *where, *more, root / "train.py", *program)


def step_of(root: Path, *program: str, cluster: str = "nodes") -> int:
    """Step of the program with arguments."""
    out = "-".join(["run", *program, *([cluster] if cluster != "nodes" else [])])
    if not (root / out).exists():
        done = ran(root, out, program=program, cluster=cluster)
        assert done.code == 0, done.err
    return int(results(root / out)["step_ns"])


def what_if(root: Path, *texts: str) -> dict[str, Any]:
    """What ``prismscale what-if`` says of the program as it is."""
    done = prismscale("what-if", root / "run", *texts, "--draws", 8)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads((root / "run" / "results.json").read_text())
    section: dict[str, Any] = found["forecast"]["what_if"]
    return section


@pytest.mark.parametrize(
    ("texts", "program", "cluster"),
    [
        (["overlap=dp off"], ["blocking"], "nodes"),
        (["recompute=off"], ["kept"], "nodes"),
        (["overlap=dp off", "recompute=off"], ["blocking", "kept"], "nodes"),
        (["link=network x0.25"], [], "slow"),
        (["group=tp on network", "group=dp on nvlink"], ["tp-first"], "nodes"),
        (["kernel=.* x0.5", "host=x4"], [], "calibrated"),
    ],
    ids=["overlap", "recompute", "both", "link", "groups", "calibration"],
)
def test_a_what_if_is_the_step_of_the_changed_program(
    folder: Path, texts: list[str], program: list[str], cluster: str
) -> None:
    """The base is the program's own step; the other side that of the changed one."""
    changed = step_of(folder, *program, cluster=cluster)
    found = what_if(folder, *texts)
    assert found["before"]["step_ns"] == step_of(folder)
    assert found["after"]["step_ns"] == changed
    assert changed != step_of(folder)


def test_every_command_has_the_same_step(folder: Path) -> None:
    """A forecast with variation off, and a run of the same captures."""
    texts = ("--what-if", "kernel=gemm x0.5", "--what-if", "overlap=dp off")
    after = what_if(folder, *texts[1::2])["after"]["step_ns"]
    done = prismscale("forecast", folder / "run", "--variability", "none", "--draws", 2, *texts)
    assert done.code == 0, done.err
    assert f"{after / 1e6:,.3f} ms" in done.out
    ran(folder, "run-hoped", *texts)
    found = results(folder / "run-hoped")
    assert found["step_ns"] == after
    assert found["step_without_ns"] == step_of(folder)
    assert [e["text"] for e in found["what_ifs"]] == list(texts[1::2])
    # A section of a forecast goes into the page of a run whose what-if adds edges to the graph.
    done = prismscale("forecast", folder / "run-hoped", "--draws", 2)
    assert done.code == 0, done.err


def test_a_job_that_hangs_is_compared_with_its_whole_step(folder: Path) -> None:
    """Not with a step that never ends; and what is beside what is that of a whole step."""
    done = ran(folder, "run-hang", "--hang", "1@step2", "--what-if", "kernel=gemm x0.5")
    assert done.code == 5, done.err
    found = results(folder / "run-hang")
    assert found["step_without_ns"] == step_of(folder)
    ((effect),) = found["what_ifs"]
    assert 0 <= effect["share"] < 1


@pytest.mark.parametrize(
    "text", ["kernel=gemm x3", "host=x9", "overlap=dp off", "recompute=off", "group=tp on network"]
)
def test_a_live_rank_takes_the_hoped_for_time(folder: Path, text: str) -> None:
    """The program itself, among peers that do. (It leaves its own step in the folder.)"""
    done = ran(folder, "run", "--live", "3", "--what-if", text)
    assert done.code == 0, done.err
    found = results(folder / "run")
    (live,) = found["live"]
    assert live["median_step_ns"] == found["step_ns"] != found["step_without_ns"]
    assert f"What if {text}" in done.out.replace("\n", " ")


def test_effects_count_what_a_step_has(folder: Path) -> None:
    """Six products forward, twelve backward, six again; four all-reduces twice."""
    (products,) = what_if(folder, "kernel=gemm x0.5")["what_ifs"]
    assert products["count"] == 24
    (again,) = what_if(folder, "recompute=off")["what_ifs"]
    assert "gemm 6" in again["touches"]
    assert "mesh_tp 6" in again["touches"]
    assert 0.15 < again["share"] < 0.35
    assert again["alone_step_ns"] == step_of(folder, "kept")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kernel=attention.* x2", "of the operators mm"),
        ("dtype=bf16", "touches nothing"),
        ("overlap=pp off", "there are mesh_dp, mesh_tp"),
        ("kernel=mm x0", "above 0"),
    ],
)
def test_what_touches_nothing_fails_with_what_there_is(folder: Path, text: str, told: str) -> None:
    """Exit code 2; nothing is written."""
    done = prismscale("what-if", folder / "run", text)
    assert done.code == 2
    assert told in " ".join(done.err.split())
