"""A mistake of a rank that nobody would have captured, through the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.runs import prismscale, results, run_job, write_program

PROGRAM = """
import torch
import torch.distributed as dist

from marker import step_ends

dist.init_process_group("gloo")
for step in range(12):
    if not (dist.get_rank() == 5 and step == 4):
        dist.all_reduce(torch.ones(8))  # left out
    dist.all_reduce(torch.ones(2))
    step_ends()
"""
LINE = 1 + PROGRAM.splitlines().index("        dist.all_reduce(torch.ones(8))  # left out")


def test_a_captured_rank_that_leaves_out_a_call_is_named(tmp_path: Path) -> None:
    """A run that captures it says who and where, and leaves records that say the same. One that
    does not sees nothing; a hang is explained in the same way."""
    script = write_program(tmp_path / "program", PROGRAM)
    out = tmp_path / "run"
    assert run_job(out, 16, script).code == 0
    done = run_job(out, 16, "--capture", "5", script)
    assert done.code == 4
    assert "rank 5 left out all_reduce of 32 Byte in group 'default_pg' of 16" in done.err
    assert f"train.py:{LINE}" in done.err
    said = prismscale("diagnose", out / "flight", "--json")
    finding = json.loads(said.out)
    assert (finding["culprits"], finding["waiting"]) == ([5], 15)
    assert finding["site"].endswith(f"train.py:{LINE}")
    hung = run_job(out, 16, "--hang", "7@step1", script)
    assert hung.code == 5
    assert "rank 7 did not come to all_reduce of 32 Byte" in hung.err
    assert results(out)["standstill"]["culprits"] == [7]


def test_further_ranks_are_checked_for_a_time(tmp_path: Path) -> None:
    """As many as the time allows, and one round at least; their number is told."""
    script = write_program(tmp_path / "program", PROGRAM.replace("== 5", "== -1"))
    out = tmp_path / "run"
    done = run_job(out, 16, "--check", "1s", script)
    assert done.code == 0, done.err
    checked = results(out)["checked"]
    assert checked
    assert not set(checked) & set(results(out)["captured"])
    said = " ".join(done.out.split())
    assert f"{len(checked)} of 16 ranks ({len(checked) / 16:.1%}".replace("%", " %") in said
    assert "were checked in their first steps" in said


FLAG_FIRST = """
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
weight = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
optimizer = torch.optim.SGD([weight])
flag = torch.ones(1)
for step in range(8):
    dist.all_reduce(flag)  # comes first
    (torch.randn(64, 1024, device="cuda") @ weight).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""
FLAG_LINE = 1 + FLAG_FIRST.splitlines().index("    dist.all_reduce(flag)  # comes first")


def test_a_rank_hangs_before_a_step_that_begins_with_a_communication(tmp_path: Path) -> None:
    """Of the host, on a null device: the engine and the records name the same call."""
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(FLAG_FIRST)
    told = ("--device", "null", "--world-size", 4, "--hang", "2@step1", "--out", out)
    hung = prismscale("run", *told, script)
    assert hung.code == 5
    assert re.search(rf"wait for rank 2: all_reduce of 4 [^:]*train\.py:{FLAG_LINE}", hung.err)
    assert "rank 2 did not come to all_reduce of 4 Byte" in hung.err
