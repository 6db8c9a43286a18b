"""A program that begins itself anew, with other variables, before it imports what reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import FEW, prismscale, results, write_program

WORLD = 4
PROGRAM = """
import os, sys
if os.environ.get("BEGUN") != str(os.getpid()):
    environment = {**os.environ, "BEGUN": str(os.getpid()), "FLAG": "set"}
    os.execvpe(sys.executable, [sys.executable, "-u", __file__, *sys.argv[1:], "more"], environment)

import json
import torch
import torch.distributed as dist
from marker import step_ends

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
line = {"flag": os.environ["FLAG"], "arguments": sys.argv[1:]}
open(os.path.join(sys.argv[1], f"said-{dist.get_rank()}"), "w").write(json.dumps(line))
for step in range(9):
    total = torch.ones(1024, 1024, device=device)
    dist.all_reduce(total @ total)
    step_ends()
"""


@pytest.mark.parametrize(
    "how",
    [
        ("--device", "null", "--live", "1,2"),
        ("--device", "cpu", "--cluster", "loopback-gloo", "--live", "1"),
        ("--device", "cpu", "--cluster", "loopback-gloo", "--values", "real", "--slots", "2"),
    ],
    ids=["null", "cpu", "values real"],
)
def test_the_new_process_is_the_same_rank(how: tuple[str, ...], tmp_path: Path) -> None:
    """With its environment and its arguments; captured, live, and among peers that are there."""
    script = write_program(tmp_path / "program", PROGRAM)
    job = ("--world-size", WORLD, "--out", tmp_path / "run", *how, *FEW)
    done = prismscale("run", *job, script, tmp_path)
    assert done.code == 0, done.err
    said = [json.loads(path.read_text()) for path in tmp_path.glob("said-*")]
    assert said
    assert all(s == {"flag": "set", "arguments": [str(tmp_path), "more"]} for s in said)
    found = results(tmp_path / "run")
    assert [live["rank"] for live in found["live"]] == [int(r) for r in _live(how)]
    assert found["step_ns"] > 0


def _live(how: tuple[str, ...]) -> list[str]:
    return how[how.index("--live") + 1].split(",") if "--live" in how else []


def test_transfers_do_not_outlive_a_process(tmp_path: Path) -> None:
    """Refused with the reason, and what to leave out."""
    script = write_program(tmp_path / "program", PROGRAM)
    job = ("--world-size", WORLD, "--out", tmp_path / "run", "--cluster", "loopback-gloo")
    done = prismscale("run", *job, "--live", "0,1", "--transfers", "real", *FEW, script, tmp_path)
    assert done.code != 0
    assert "Leave out --transfers" in done.err
