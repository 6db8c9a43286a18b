"""Checkpoints on the null device: exact sizes, the storage's time, and nothing on the disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from prismscale.devices.null import runtime
from prismscale.devices.null.saves.checkpoints import CheckpointLedger, CheckpointSaves
from prismscale.devices.null.saves.host_copies import LARGE_BYTES, HostCopies
from prismscale.devices.storage import Storage
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.emulation.work import EmulatedWork
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload

RANK, RANKS = 3, 8
BYTES_PER_S = 1e6


class CountingHook:
    """Peers do what this rank does."""

    def __init__(self) -> None:
        self.calls = 0

    def communicate(self, batch: Any) -> EmulatedWork:
        self.calls += 1
        for collective in batch:
            MirrorPayload().fill(collective)
        return EmulatedWork([t for c in batch for t in c.outputs], lambda _: None)


@pytest.fixture
def hook() -> Iterator[CountingHook]:
    """Rank 3 of 8."""
    hook = CountingHook()
    with absent_peers(RankEnvironment(rank=RANK, world_size=RANKS), hook):
        torch.cuda.set_device(RANK)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        yield hook


@pytest.fixture
def ledger(hook: CountingHook) -> Iterator[CheckpointLedger]:
    """Saves as a captured rank does, to slow storage, after 5 optimizer calls."""
    active = runtime.active()
    storage = Storage(write_bytes_per_s=BYTES_PER_S)
    ledger = CheckpointLedger(active.library, storage, lambda: 5)
    with CheckpointSaves(active.library, ledger, HostCopies(active.ledger)).active():
        yield ledger


def sharded() -> nn.Module:
    """Two layers over 8 ranks; one weight's shard is large."""
    layers = (nn.Linear(4096, 1024, bias=False), nn.Linear(1024, 64, bias=False))
    return fully_shard(nn.Sequential(*layers).cuda())


def file_bytes(*shapes: tuple[int, int]) -> int:
    """Of a file with float tensors of ``shapes``, one after another, as torch.save writes them."""
    total = 0
    for shape in shapes:
        file = io.BytesIO()
        torch.save(torch.zeros(shape), file)
        total += file.tell()
    return total


SHARDS = ((1024 // RANKS, 4096), (64 // RANKS, 1024))


def host_ns() -> int:
    return int(runtime.active().library.ps_host_time_ns())


def save(folder: Path, **options: Any) -> Any:
    """Save asynchronously."""
    asynchronous: Any = dcp.async_save
    return asynchronous({"model": sharded().state_dict()}, checkpoint_id=folder, **options)


def test_a_save_is_this_ranks_shards_to_the_byte(ledger: CheckpointLedger, tmp_path: Path) -> None:
    """Of a large shard and a small one; the folder stays empty."""
    dcp.save({"model": sharded().state_dict()}, checkpoint_id=tmp_path)

    (use,) = ledger.uses
    assert use.n_bytes == file_bytes(*SHARDS)
    assert (use.after_optimizer_calls, use.is_async) == (5, False)
    assert not list(tmp_path.iterdir())


def test_the_program_waits_for_the_storage(ledger: CheckpointLedger, tmp_path: Path) -> None:
    """Of the two megabytes at one a second two seconds are the host's."""
    state = {"model": sharded().state_dict()}
    began = host_ns()
    dcp.save(state, checkpoint_id=tmp_path)

    (use,) = ledger.uses
    assert use.write_ns == pytest.approx(use.n_bytes / BYTES_PER_S * 1e9)
    assert use.write_ns < host_ns() - began < 1.01 * use.write_ns


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_an_asynchronous_save_takes_only_its_copies(
    kind: AsyncCheckpointerType, ledger: CheckpointLedger, tmp_path: Path
) -> None:
    """The program waits for the transfer to the host, and for no storage."""
    began = host_ns()
    save(tmp_path, async_checkpointer_type=kind).result()

    (use,) = ledger.uses
    assert (use.n_bytes, use.is_async) == (file_bytes(*SHARDS), True)
    assert 10_000 < host_ns() - began < use.write_ns / 100


def test_copies_on_a_stream_of_their_own_are_waited_for_when_asked(
    ledger: CheckpointLedger, tmp_path: Path
) -> None:
    """As torchtitan stages: the host goes on, and waits when it wants the copies."""
    stager = DefaultStager(StagingOptions(use_pinned_memory=True))
    response = save(tmp_path, async_stager=stager)
    issued = host_ns()
    response.staging_completion.result()
    stager._staging_future.result()  # type: ignore[union-attr]
    assert host_ns() > issued
    assert ledger.uses[0].n_bytes == file_bytes(*SHARDS)
    stager.close()


def test_threads_of_a_writer_count_together(ledger: CheckpointLedger, tmp_path: Path) -> None:
    """Two files, one figure."""
    writer = dcp.FileSystemWriter(tmp_path, thread_count=2)
    dcp.save({"model": sharded().state_dict()}, storage_writer=writer)
    assert ledger.uses[0].n_bytes == file_bytes(*SHARDS)


def test_a_checkpoint_asks_nothing_of_the_device(ledger: CheckpointLedger, tmp_path: Path) -> None:
    """No value is made up for the program."""
    runtime.active().ledger.clear()
    dcp.save({"model": sharded().state_dict()}, checkpoint_id=tmp_path)
    save(tmp_path).result()
    assert runtime.active().ledger.uses() == []


def test_a_large_copy_takes_no_memory(ledger: CheckpointLedger) -> None:
    """64 GB on the host: right size and type, read as zeros."""
    device = torch.empty(2**14, 2**20, dtype=torch.bfloat16, device="cuda")
    copied = HostCopies(runtime.active().ledger).of_tensor(device, non_blocking=True)
    assert (copied.shape, copied.dtype, copied.device.type) == (device.shape, device.dtype, "cpu")
    assert copied.nbytes > LARGE_BYTES
    assert copied[-1, -8:].tolist() == [0.0] * 8


def test_small_known_values_are_copied(ledger: CheckpointLedger) -> None:
    """A step count reaches the host."""
    copied = HostCopies(runtime.active().ledger).of_tensor(
        torch.tensor(7.0, device="cuda"), non_blocking=False
    )
    assert copied.item() == 7.0
