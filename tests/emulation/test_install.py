"""Installing the emulation: backend names, groups, rendezvous, and how torch is left behind."""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import PrismscaleError, UsageError
from prismscale.payload.absent_peers import absent_peers
from support.emulation import GroupLog, RecordingHook, emulated


def _x() -> torch.Tensor:
    return torch.ones(4)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "ucc", "xccl", "cpu:gloo,cuda:nccl", None])
def test_every_backend_name_is_answered(backend: str | None) -> None:
    """Any backend name initialises, communicates, and is answered by get_backend."""
    with emulated(backend=backend) as hook:
        tensor = _x()
        dist.all_reduce(tensor)
        assert tensor.tolist() == [4.0] * 4
        assert dist.get_backend() == (backend or "undefined")
        assert hook.last.group.backend == (backend or "undefined")


def test_mpi_takes_its_rank_from_the_environment() -> None:
    """MPI, which assigns ranks itself, assigns those of the emulated environment."""
    with emulated(3, 8, "mpi") as hook:
        dist.all_reduce(_x(), group=dist.new_group([1, 3]))
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        assert hook.last.group.ranks == (1, 3)


def test_registered_backends_are_answered() -> None:
    """A third party's backend name is answered, its own constructor is not called."""

    def connects(*arguments: Any) -> None:
        raise ConnectionError("no peers")

    dist.Backend.register_backend("vendor", connects, devices=["cpu"])
    with emulated(backend="vendor") as hook:
        dist.all_reduce(_x())
        assert hook.last.group.backend == "vendor"
        assert dist.get_backend() == "vendor"


def test_fake_groups_stay_silent() -> None:
    """torch's own fake backend does not communicate, here as there, and has no group index."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    log = GroupLog()
    with emulated(observer=log) as hook:
        dist.all_reduce(_x(), group=dist.new_group([0, 1], backend="fake"))
        assert hook.batches == []
        assert len(log.created) == 1


def test_availability_is_true_while_installed() -> None:
    """Programs that ask for a backend before they use it are told that it is there."""
    before = dist.is_nccl_available()
    with emulated():
        assert dist.is_nccl_available()
        assert dist.is_backend_available("cpu:gloo,cuda:nccl")
        assert dist.ProcessGroupNCCL.Options(is_high_priority_stream=True).is_high_priority_stream
    assert dist.is_nccl_available() == before


def test_groups_are_numbered_in_creation_order() -> None:
    """Group indices count this rank's groups; other groups are observed without a group index."""
    log = GroupLog()
    with emulated(2, 4, observer=log) as hook:
        dist.new_group([0, 1], group_desc="dp")
        mine = dist.new_group([2, 3], group_desc="dp")
        dist.all_reduce(_x(), group=mine)
        assert log.created[0] == ((0, 1, 2, 3), "default_pg", "gloo", 0)
        assert log.created[1:] == [((0, 1), "dp", "gloo", None), ((2, 3), "dp", "gloo", 1)]
        assert (hook.last.group.group_index, hook.last.group.name) == (1, "dp")


def test_new_group_takes_all_its_arguments() -> None:
    """Timeout, backend, options, local synchronisation and description are accepted."""
    with emulated(backend="nccl") as hook:
        options = dist.ProcessGroupNCCL.Options()
        options.config.cga_cluster_size = 4
        options._timeout = timedelta(seconds=5)
        group = dist.new_group(
            [0, 1],
            timeout=timedelta(seconds=5),
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc="tensor parallel",
        )
        dist.all_reduce(_x(), group=group)
        assert group.group_desc == "tensor parallel"
        assert dist.get_process_group_ranks(group) == [0, 1]
        assert hook.last.group.name == "tensor parallel"


@pytest.mark.skipif(
    "sort_ranks" not in signature(dist.new_group).parameters, reason="torch 2.11 sorts all groups"
)
def test_unsorted_groups_keep_the_programs_order() -> None:
    """With sort_ranks=False the position in the list is the group rank."""
    with emulated(1, 4) as hook:
        dist.all_reduce(_x(), group=dist.new_group([3, 1], sort_ranks=False))
        assert (hook.last.group.ranks, hook.last.group.group_rank) == ((3, 1), 1)


def test_subgroups_and_meshes_create_their_groups() -> None:
    """new_subgroups and DeviceMesh, sliced and flattened, give this rank its groups."""
    with emulated(5, 8) as hook:
        mine, _ = dist.new_subgroups(2)
        listed, _ = dist.new_subgroups_by_enumeration([[0, 1, 2], [3, 4, 5]])
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        flat = mesh["pp", "dp"]._flatten("pp_dp")
        for group in (mine, listed, mesh["tp"].get_group(), flat.get_group()):
            dist.all_reduce(_x(), group=group)
        assert [record.group.ranks for record in hook.collectives] == [
            (4, 5),
            (3, 4, 5),
            (4, 5),
            (1, 3, 5, 7),
        ]
        assert [r.group.name for r in hook.collectives[2:]] == ["mesh_tp", "mesh_pp_dp"]


def test_split_group_makes_and_reports_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """split_group, which torch allows beside an accelerator, observes all parts and joins ours."""
    log = GroupLog()
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with emulated(3, 4, "nccl", observer=log) as hook:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
        dist.group.WORLD.bound_device_id = cuda  # type: ignore[union-attr]
        child = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="half")
        dist.all_reduce(_x(), group=child)
        assert log.created[1:] == [((0, 1), "half", "nccl", None), ((2, 3), "half", "nccl", 1)]
        assert hook.last.group.ranks == (2, 3)
        assert dist.get_rank(child) == 1


def test_shrunk_group_renumbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """shrink_group leaves a working group without the excluded ranks."""
    with emulated(3, 4, "cuda:nccl,cpu:nccl") as hook:
        group = dist.new_group([0, 1, 3])
        remaining = dist.shrink_group([0], group=group)
        dist.all_reduce(_x(), group=remaining)
        assert hook.last.group.ranks == (1, 3)


@pytest.mark.parametrize("init_method", ["env://", "tcp://10.0.0.1:1234", "file:///nowhere/x"])
def test_rendezvous_needs_no_peers(init_method: str) -> None:
    """Each way to meet completes at once and touches no network or file."""
    with absent_peers(RankEnvironment(rank=5, world_size=65_536), RecordingHook()):
        named = {} if init_method == "env://" else {"rank": 5, "world_size": 65_536}
        dist.init_process_group("gloo", init_method=init_method, **named)
        assert (dist.get_rank(), dist.get_world_size()) == (5, 65_536)
    assert not Path("/nowhere").exists()


def test_torchruns_environment_is_set_and_taken_back() -> None:
    """The program sees torchrun's variables; afterwards they are as before."""
    before = dict(os.environ)
    with absent_peers(RankEnvironment(rank=17, world_size=64, local_world_size=8), RecordingHook()):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
        assert [os.environ[name] for name in names] == ["17", "64", "1", "2", "8"]
        assert dist.is_torchelastic_launched()
    assert dict(os.environ) == before


@pytest.mark.parametrize(("own", "seen"), [(None, "disabled"), ("offline", "offline")])
def test_no_service_is_told_unless_the_user_says_so(
    own: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights & Biases is switched off; what the user has set stays."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if own is not None:
        monkeypatch.setenv("WANDB_MODE", own)
    with emulated():
        assert os.environ["WANDB_MODE"] == seen
    assert os.environ.get("WANDB_MODE") == own


def test_torch_is_left_as_it_was() -> None:
    """After the block torch holds its own objects again and another rank can run."""
    names = ("TCPStore", "FileStore", "HashStore", "ProcessGroupGloo", "split_group")
    before = [getattr(dist, name) for name in names]
    hook = sys.excepthook
    for rank in range(3):
        with emulated(rank, 4):
            assert dist.get_rank() == rank
    assert [getattr(dist, name) for name in names] == before
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_groups_do_not_outlive_their_emulation() -> None:
    """A communication after the block is refused instead of silently dropped."""
    with emulated():
        world: Any = dist.group.WORLD
    fresh = type(world)(0, 2)
    with pytest.raises(PrismscaleError, match="emulation had ended"):
        fresh.allreduce([_x()])


def test_one_rank_at_a_time() -> None:
    """A second emulation in the same process is refused."""
    second = absent_peers(RankEnvironment(rank=0, world_size=1), RecordingHook())
    with emulated(), pytest.raises(UsageError, match="already"), second:
        pass


@pytest.mark.parametrize(
    ("rank", "world_size", "local"), [(4, 4, 8), (-1, 4, 8), (0, 0, 8), (0, 12, 8), (0, 4, 0)]
)
def test_impossible_ranks_are_refused(rank: int, world_size: int, local: int) -> None:
    """A rank outside the world or a world that does not fill its nodes is an error."""
    with pytest.raises(UsageError):
        RankEnvironment(rank=rank, world_size=world_size, local_world_size=local)
