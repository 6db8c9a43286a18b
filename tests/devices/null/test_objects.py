"""Object collectives on groups of the null device: pickles keep their bytes."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.emulation.work import EmulatedWork
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload

LARGE = {"names": [f"layers.{i}.weight" for i in range(4_000)]}
"""Pickled, larger than any value that the device remembers."""


class MirrorHook:
    """Peers do what this rank does."""

    def communicate(self, batch):
        for collective in batch:
            MirrorPayload().fill(collective)
        return EmulatedWork([t for c in batch for t in c.outputs], lambda _: None)


@pytest.fixture(autouse=True)
def nccl_group():
    with absent_peers(RankEnvironment(rank=1, world_size=4), MirrorHook()):
        dist.init_process_group("nccl", device_id=torch.device("cuda", 1))
        yield


def test_gathered_objects_are_whole() -> None:
    """all_gather_object returns as many unpickled objects as there are members."""
    gathered = [None] * 4
    dist.all_gather_object(gathered, LARGE)

    assert gathered == [LARGE] * 4


def test_a_broadcast_on_the_device_is_whole() -> None:
    """A program that names the CUDA device for its pickles gets its objects too."""
    objects = [LARGE]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cuda", 1))

    assert objects == [LARGE]


def test_scattered_objects_are_whole() -> None:
    """scatter_object_list answers what this rank holds."""
    received = [LARGE]
    dist.scatter_object_list(received, None, src=0)

    assert received == [LARGE]


def test_objects_are_sent_from_the_host() -> None:
    """Point-to-point objects, as between pipeline stages, leave on a group that has only NCCL."""
    # Raises otherwise.
    dist.send_object_list([LARGE], dst=2, device=torch.device("cuda", 1))
    dist.send_object_list([LARGE], dst=2, use_batch=True)
