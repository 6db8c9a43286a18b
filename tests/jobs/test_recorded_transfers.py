"""Live ranks that hear what all ranks said when they ran, and really communicate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import MARK, left_running, prismscale

WORLD = 4
PROGRAM = """
import json, torch
import torch.distributed as dist
from marker import step_ends

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
everyone = [None] * world
dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 * rank)})
line = [len(everyone[k]["text"]) for k in range(world)]
for step in range(9):
    mine = torch.arange(8.0) * (rank + 1) + step
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        total = mine.clone()
        dist.all_reduce(total, op)
        line += total.tolist()
    flag = torch.tensor([rank == 3])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    line += flag.tolist()
    part = torch.empty(2)
    dist.reduce_scatter_single(part, mine)
    whole = torch.empty(8)
    dist.all_gather_single(whole, part)
    line += whole.tolist()
    rows = torch.arange(10.0).view(5, 2) + 100 * rank
    given = [2, 1, 1, 1] if rank == 0 else [1, 2, 1, 1]
    got = [2, 1, 1, 1] if rank == 0 else ([1, 2, 2, 2] if rank == 1 else [1, 1, 1, 1])
    came = torch.empty(sum(got), 2)
    dist.all_to_all_single(came, rows, got, given)
    line += came.view(-1).tolist()
    for root in (0, 3):
        said = mine.clone()
        dist.broadcast(said, root)
        line += said.tolist()
        dist.reduce(said, root)
        line += said.tolist() if rank == root else []
        slots = [torch.empty(8) for _ in range(world)] if rank == root else None
        dist.gather(mine, slots, root)
        line += torch.cat(slots).tolist() if slots else []
        piece = torch.empty(8)
        dist.scatter(piece, [mine * k for k in range(world)] if rank == root else None, root)
        line += piece.tolist()
    dist.all_reduce(mine, group=pair)
    line += mine.tolist()
    ring = torch.empty(8)
    ops = [dist.P2POp(dist.isend, mine, (rank + 1) % world)]
    ops += [dist.P2POp(dist.irecv, ring, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    line += ring.tolist()
    handle = dist.all_reduce(ring, async_op=True)
    handle.wait()
    line += ring.tolist()
    open(f"said-{rank}.jsonl", "a").write(json.dumps(line) + "\\n")
    line = []
    step_ends()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that a run leaves behind are found; programs write beside themselves."""
    monkeypatch.setenv(MARK, "recorded-transfers")
    monkeypatch.chdir(tmp_path)


def run(folder: Path, *more: object) -> tuple[int, str]:
    """``prismscale run --values real`` with live ranks; exit code and errors."""
    (folder / "marker.py").write_text("def step_ends():\n    pass\n")
    (folder / "train.py").write_text(PROGRAM)
    options = ("--world-size", WORLD, "--values", "real", "--slots", 2, "--no-memory")
    marker = ("--step-marker", "marker:step_ends", "--samples", 7, "--steps", 4)
    out = ("--cluster", "loopback-gloo", "--out", folder / "run", "--clock", "virtual", *more)
    ended = prismscale("run", *options, *marker, *out, folder / "train.py")
    return ended.code, ended.err


def said(folder: Path, rank: int) -> list[list[float]]:
    """All lines of a rank: those of the run of all ranks come first."""
    lines = (folder / f"said-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_live_ranks_hear_what_was_recorded(tmp_path: Path) -> None:
    """All collectives, messages and objects: in rings, in trees, and with nothing on the wire."""
    seen = dict.fromkeys((1, 2), 9)
    for transfers in ("real", "tree", "emulated"):
        # Recorded once: what differs is how live ranks hear it.
        code, err = run(tmp_path, "--record", "all", "--live", "1,2", "--transfers", transfers)
        assert code == 0, err
        for rank, before in seen.items():
            lines = said(tmp_path, rank)
            assert len(lines) >= before + 5
            for expected, heard in zip(lines, lines[before:], strict=False):
                assert heard == pytest.approx(expected, rel=1e-6), transfers
            seen[rank] = len(lines)
        result = json.loads((tmp_path / "run" / "results.json").read_text())
        for live in result["live"]:
            moved = live.get("moved", {})
            assert (moved.get("sent_bytes", 0) > 0) == (transfers != "emulated")
            assert moved.get("defined", 0) == moved.get("communications", 0)
    assert left_running("recorded-transfers") == []


def test_a_selection_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    """It is told by its text."""
    code, err = run(tmp_path, "--record", "group=mesh_tp")
    assert code == 2
    assert "'group=mesh_tp' fits no communication" in err
