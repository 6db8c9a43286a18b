"""Programs whose ranks all run, a few at a time, and hear what the others really say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prismscale.graph.io import load_graph
from prismscale.runfolder import RunFolder
from prismscale.switching.spilled_memory import resident_bytes
from support.runs import MARK, left_running, prismscale

WORLD = 4
HEAD = """
import json, os, sys
import torch
import torch.distributed as dist
from marker import step_ends

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""
TALKING = (
    HEAD
    + """
store = dist.distributed_c10d._get_default_store()
store.set(f"hello-{rank}", f"from {rank}")
greeting = store.get(f"hello-{(rank + 1) % world}").decode()
everyone = [None] * world
dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 * rank)})
for step in range(9):
    total = torch.tensor([float(rank + 1) * (step + 1)])
    dist.all_reduce(total)
    # A decision that depends on what all ranks have.
    if total.item() > 60:
        ring = torch.tensor([float(rank)])
        got = torch.empty(1)
        sends = dist.P2POp(dist.isend, ring, (rank + 1) % world)
        takes = dist.P2POp(dist.irecv, got, (rank - 1) % world)
        for work in dist.batch_isend_irecv([sends, takes]):
            work.wait()
    else:
        got = torch.tensor([-1.0])
    step_ends()
    line = [step, total.item(), got.item()]
    line += [greeting, len(everyone[-1]["text"])]
    open(f"said-{rank}.jsonl", "a").write(json.dumps(line) + "\\n")
dist.destroy_process_group()
"""
)
CROSSED = (
    HEAD
    + """
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
if rank < 2:
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)
    step_ends()
dist.barrier()
"""
)
FAILING = (
    HEAD
    + """
for step in range(9):
    if rank == 2 and step == 3:
        raise ValueError("bad batch")
    dist.barrier()
    step_ends()
"""
)
KILLED = (
    HEAD
    + """
import signal
open(f"pid-{rank}", "w").write(str(os.getpid()))
for step in range(9):
    dist.barrier()
    if rank == 0 and step == 3:
        os.kill(int(open("pid-3").read()), signal.SIGKILL)
    step_ends()
"""
)
POLLING = (
    HEAD
    + """
left, right = (rank - 1) % world, (rank + 1) % world
for step in range(9):
    total = torch.tensor([1.0 + step + rank])
    work = dist.all_reduce(total, async_op=True)
    polls = 0
    while not work.is_completed():
        polls += 1
    line = [total.item()]
    # The long message is sent first and received last: only its tag tells which it is.
    long, short = torch.arange(5.0) + rank, torch.tensor([-1.0 * rank])
    sent = [dist.isend(long, right, tag=7), dist.isend(short, right, tag=9)]
    got_short, got_long = torch.empty(1), torch.empty(5)
    taken = dist.irecv(got_short, left, tag=9), dist.irecv(got_long, left, tag=7)
    for work in (*taken, *sent):
        work.wait()
    line += [got_short.item(), got_long.tolist(), polls < 100]
    step_ends()
    open(f"said-{rank}.jsonl", "a").write(json.dumps(line) + "\\n")
"""
)
FULL = (
    HEAD
    + """
weights = torch.full((12 << 20,), float(rank))
for step in range(9):
    total = weights[:1].clone()
    dist.all_reduce(total)
    weights += total
    step_ends()
    line = [weights.double().mean().item(), weights.min().item()]
    open(f"said-{rank}.jsonl", "a").write(json.dumps(line) + "\\n")
"""
)


def run(folder: Path, program: str, *more: object) -> tuple[int, str, str]:
    """``prismscale run --values real`` of a program; exit code, output and errors."""
    (folder / "marker.py").write_text("def step_ends():\n    pass\n")
    (folder / "train.py").write_text(program)
    options = ("--world-size", WORLD, "--values", "real", "--slots", 2, "--no-memory")
    marker = ("--step-marker", "marker:step_ends", "--samples", 7)
    out = ("--cluster", "loopback-gloo", "--out", folder / "run", *more)
    ended = prismscale("run", *options, *marker, *out, folder / "train.py")
    return ended.code, ended.out, ended.err


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a run leaves behind are found."""
    monkeypatch.setenv(MARK, "real-values")


def test_every_rank_hears_what_the_others_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores, objects, sums, messages; and the branch that the sums ask for is taken."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run(tmp_path, TALKING)
    assert code == 0, err
    for rank in range(WORLD):
        lines = (tmp_path / f"said-{rank}.jsonl").read_text().splitlines()
        for step, line in enumerate(map(json.loads, lines)):
            total = 10.0 * (step + 1)
            got = float((rank - 1) % WORLD) if total > 60 else -1.0
            assert line == [step, total, got, f"from {(rank + 1) % WORLD}", 30]
    graph = load_graph(RunFolder(root=tmp_path / "run").graph)
    assert graph.world_size == WORLD


def test_what_a_poll_finds_completed_is_there_and_tags_tell_messages_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polls let other ranks run, so that few are needed; messages of a pair overtake each other."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run(tmp_path, POLLING)
    assert code == 0, err
    for rank in range(WORLD):
        left = (rank - 1) % WORLD
        lines = (tmp_path / f"said-{rank}.jsonl").read_text().splitlines()
        for step, line in enumerate(map(json.loads, lines)):
            total = sum(1.0 + step + r for r in range(WORLD))
            assert line == [total, -1.0 * left, [i + float(left) for i in range(5)], True]


def test_ranks_stay_within_a_budget_and_find_their_memory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are suspended are pressed out; nothing is left on the disk."""
    monkeypatch.chdir(tmp_path)
    # The command runs in this process, which other tests have filled.
    mib = 760 + (resident_bytes() >> 20)
    code, _, err = run(tmp_path, FULL, "--memory", f"{mib}MiB")
    assert code == 0, err
    weights = [float(r) for r in range(WORLD)]
    # The last step ends the program.
    for step in range(8):
        total = sum(weights)
        weights = [w + total for w in weights]
        for rank, weight in enumerate(weights):
            line = (tmp_path / f"said-{rank}.jsonl").read_text().splitlines()[step]
            assert json.loads(line) == [weight, weight]
    switched = json.loads((tmp_path / "run" / "results.json").read_text())["switched"]
    assert switched["presses"] > 0
    assert not list((tmp_path / "run").glob("captures/*/values"))


def test_a_budget_that_no_rank_fits_is_an_error(tmp_path: Path) -> None:
    """With one that would do, and nothing left running."""
    code, _, err = run(tmp_path, FULL, "--memory", "50MiB")
    assert code == 2
    assert "too little" in err
    assert left_running("real-values") == []


def test_ranks_that_wait_for_each_other_are_told(tmp_path: Path) -> None:
    """Two groups in opposite order: who waits for what, and where. Nothing is left running."""
    code, _, err = run(tmp_path, CROSSED)
    assert code == 5
    assert "rank 0 waits for all_reduce of 4 bytes" in err
    assert "train.py:" in err
    assert left_running("real-values") == []


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """With its own error; the others, suspended or not, are ended."""
    code, _, err = run(tmp_path, FAILING)
    assert code == 3
    assert "rank 2" in err
    assert "bad batch" in err
    assert left_running("real-values") == []


def test_a_rank_that_is_killed_while_others_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended or waiting, it will never send what they wait for."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run(tmp_path, KILLED)
    assert code == 3
    assert "rank 3" in err
    assert left_running("real-values") == []
