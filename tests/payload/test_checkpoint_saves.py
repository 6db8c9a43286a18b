"""Checkpoints of programs on the CPU, as one rank without peers saves them."""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from prismscale.devices.storage import Storage
from prismscale.emulation.after_import import changed, replace
from prismscale.errors import UsageError
from support.emulation import emulated


def model() -> nn.Module:
    """4 x 16 x 32 weights."""
    return nn.Linear(64, 32, bias=False)


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_an_asynchronous_save_is_in_no_step(kind: AsyncCheckpointerType, tmp_path: Path) -> None:
    """The file is written; of its communications only those of the program's thread are seen."""
    with emulated(0, 4) as hook:
        sharded = fully_shard(model())
        before = len(hook.collectives)
        save: Any = dcp.async_save
        save(
            {"m": sharded.state_dict()}, checkpoint_id=tmp_path, async_checkpointer_type=kind
        ).result()
        made = [c.op.spelling for c in hook.collectives[before:]]
    assert list(tmp_path.glob("__0_*.distcp"))
    # Where processes would meet is told to all ranks by the program's own thread.
    assert made == (["broadcast"] * 2 if kind is AsyncCheckpointerType.PROCESS else [])


def test_replicas_share_what_they_save(tmp_path: Path) -> None:
    """Of 8 tensors that 2 ranks replicate, each saves 4: together each is saved once."""
    kept = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        with emulated(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            state = {
                f"t{k}": distribute_tensor(torch.ones(8, 8), mesh, [Replicate()]) for k in range(8)
            }
            dcp.save(state, checkpoint_id=folder)  # type: ignore[arg-type]
        kept.append(next(folder.glob("*.distcp")).stat().st_size)
    assert kept[0] == kept[1] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_planner_may_leave_all_replicas_to_the_lowest_rank(rank: int, tmp_path: Path) -> None:
    """The first of them saves all, the other what is its own."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with emulated(rank, 2):
        state = {f"t{k}": torch.ones(8, 8) for k in range(4)} | {f"rank_{rank}": torch.ones(2)}
        dcp.save(state, checkpoint_id=tmp_path, planner=planner)
    # Each saved tensor is an archive, which names what is in it twice.
    n_saved = next(tmp_path.glob("*.distcp")).read_bytes().count(b"data.pkl") / 2
    assert n_saved == (5 if rank == 0 else 1)


def test_what_is_one_ranks_own_it_saves(tmp_path: Path) -> None:
    """Of 4 objects that 4 ranks have, each saves 1; its place in the data is its own."""
    with emulated(2, 4):
        state = {f"group.{k}": k for k in range(4)} | {"data": {"dp_rank_2": "here"}}
        dcp.save(state, checkpoint_id=tmp_path)
    assert next(tmp_path.glob("__2_*.distcp")).read_bytes().count(b"data.pkl") == 2 * 2


def test_a_module_is_changed_after_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes a name from it has the changed one; afterwards it is as it was."""
    (tmp_path / "late_module.py").write_text("def answer(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def change(module: Any, undo: ExitStack) -> None:
        replace(undo, module, "answer", lambda: 2)

    with changed({"late_module": change}), changed({"late_module": lambda module, undo: None}):
        assert importlib.import_module("late_module").answer() == 2
    assert sys.modules.pop("late_module").answer() == 1


def test_storage_writes_at_its_speed() -> None:
    """5 GB at 2 GB/s."""
    assert Storage(write_bytes_per_s=2e9).write_ns(5_000_000_000) == 2_500_000_000


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_of_storage_that_is_none_is_refused(speed: float) -> None:
    """With an example."""
    with pytest.raises(UsageError, match="2 for 2 GB/s"):
        Storage(write_bytes_per_s=speed)
