"""``prismscale check-devices``: a device that is slow is named by the job's own ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.runs import FEW, prismscale, write_program

PROGRAM = """
import os
import time

import torch
import torch.distributed as dist

from marker import step_ends

dist.init_process_group("gloo")
slow = int(os.environ["SLOW_CORE"])
for step in range(50):
    # The device: it takes longer for the same work.
    time.sleep(0.12 if os.sched_getaffinity(0) == {slow} else 0.06)
    total = torch.ones(1)
    dist.all_reduce(total)
    step_ends()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a pair needs two cores")
def test_the_slow_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are slow on it, and the job's step with it is its own."""
    first, slow = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("SLOW_CORE", str(slow))
    program = write_program(tmp_path, PROGRAM)
    told = tmp_path / "devices.json"
    done = prismscale(
        *("check-devices", "--on", f"{first},{slow}", "--tolerance", 30, "--json", told),
        *("--world-size", 4, "--cluster", "loopback-gloo", "--live", "1,2", *FEW),
        *("--out", tmp_path / "run", program),
    )
    assert done.code == 8, done.err
    assert f"device {slow} (x" in done.err
    devices = {d["device"]: d for d in json.loads(told.read_text())["devices"]}
    assert [devices[first]["is_slow"], devices[slow]["is_slow"]] == [False, True]
    assert {turn["rank"] for turn in devices[slow]["turns"]} == {1, 2}


def test_two_ranks_are_needed(tmp_path: Path) -> None:
    """A check says how many it was given."""
    program = write_program(tmp_path, PROGRAM)
    done = prismscale(
        *("check-devices", "--world-size", 4, "--live", "1", "--cluster", "loopback-gloo"),
        *("--out", tmp_path / "run", program),
    )
    assert done.code == 2
    assert "two of the job's ranks" in " ".join(done.err.split())
