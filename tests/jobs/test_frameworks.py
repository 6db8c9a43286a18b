"""torch's parallel wrappers, unchanged, as one rank without peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from support.emulation import RecordingHook, emulated


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def _step(model: nn.Module) -> None:
    model(torch.ones(4, 16)).sum().backward()


def _ops(hook: RecordingHook) -> list[str]:
    return [collective.op.spelling for collective in hook.collectives]


def test_ddp_gradients_are_those_of_one_rank() -> None:
    """DDP's mean over ranks that all do the same is the gradient of a single rank."""
    alone = _model()
    _step(alone)
    with emulated(5, 16):
        model = DistributedDataParallel(_model())
        _step(model)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_ddp_waits_after_the_last_bucket_was_issued() -> None:
    """The Reducer's waits are seen at the end of the backward pass, not at each bucket."""
    with emulated() as hook:
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.001)  # type: ignore[arg-type]
        for _ in range(2):  # buckets are rebuilt at the second step
            _step(model)
        issued = len(hook.batches)
        waits = len(hook.n_issued_at_wait)
        _step(model)
        buckets = len(hook.batches) - issued
        assert buckets > 1
        assert hook.n_issued_at_wait[waits:] == [len(hook.batches)] * buckets


def test_ddp_with_a_communication_hook() -> None:
    """A Python communication hook, which chains futures, completes."""
    with emulated() as hook:
        model = DistributedDataParallel(_model())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for _ in range(2):
            _step(model)
        assert hook.last.inputs[0].dtype is torch.float16


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_ddp_variants_complete(option: str) -> None:
    """A static graph issues and waits in one callback; unused parameters reduce a map as well."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = _model(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with emulated() as hook:
        module = Branching() if option == "find_unused_parameters" else _model()
        model = DistributedDataParallel(module, **{option: True})
        for _ in range(3):
            _step(model)
        assert "all_reduce" in _ops(hook)


def test_fsdp1_trains() -> None:
    """FullyShardedDataParallel gathers, scatters and clips."""
    with emulated() as hook:
        model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(_ops(hook))


def test_fsdp2_shards_and_reduces() -> None:
    """fully_shard gathers parameters in place and reduces gradients to this rank's shard."""
    with emulated() as hook:
        model = fully_shard(_model())
        for _ in range(2):
            _step(model)
            torch.optim.AdamW(model.parameters()).step()
        assert _ops(hook) == ["all_gather", "reduce_scatter"] * 2
        assert all(torch.isfinite(p.to_local()).all() for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_tensor_parallel_within_fsdp_on_a_3d_mesh() -> None:
    """Tensor parallelism and FSDP2 use the groups of their own mesh axes."""
    with emulated(5, 16) as hook:
        mesh = dist.init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
        model = _model()
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        _step(model)
        used = {(c.op.spelling, c.group.name) for c in hook.collectives}
        assert {("all_reduce", "mesh_tp"), ("all_gather", "mesh_dp")} <= used
        assert ("reduce_scatter", "mesh_dp") in used


def _static_stage(rank: int, index: int, n_stages: int) -> PipelineStage:
    example = torch.empty(2, 16).requires_grad_(index > 0)
    return PipelineStage(
        nn.Linear(16, 16),
        index,
        n_stages,
        torch.device("cpu"),
        input_args=example,
        output_args=torch.empty(2, 16).requires_grad_(),
    )


def _run_schedule(schedule: Any, rank: int) -> None:
    x = torch.ones(8, 16)
    arguments: dict[int, Callable[[], Any]] = {
        0: lambda: schedule.step(x),
        3: lambda: schedule.step(target=x),
    }
    arguments.get(rank, schedule.step)()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_pipeline_with_static_shapes_runs_alone(rank: int, backend: str) -> None:
    """A 1F1B stage of known shapes sends and receives one message a microbatch and direction."""
    with emulated(rank, 4, backend) as hook:
        schedule = Schedule1F1B(_static_stage(rank, rank, 4), 4, loss_fn=_loss)
        _run_schedule(schedule, rank)
        messages = [c for c in hook.collectives if c.n_bytes == 2 * 16 * 4]
        neighbours = 1 if rank in (0, 3) else 2
        assert len(messages) == neighbours * 2 * 4
        assert {c.root for c in messages} <= {rank - 1, rank + 1}


def test_interleaved_pipeline_runs_alone() -> None:
    """Interleaved 1F1B with two stages on each rank completes on a middle rank."""
    with emulated(1, 4) as hook:
        stages = [_static_stage(1, 1 + 4 * k, 8) for k in range(2)]
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=_loss)
        _run_schedule(schedule, 1)
        assert {"send", "recv"} <= set(_ops(hook))


def test_pipeline_stages_learn_shapes_from_each_other(tmp_path: Path) -> None:
    """Stages without static shapes, captured at the same time, exchange their metadata."""
    script = Path(__file__).parents[1] / "support" / "pipeline_stage.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    stages = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [stage.communicate(timeout=120)[0] for stage in stages]
    assert [stage.returncode for stage in stages] == [0, 0]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert (first.count("send"), first.count("recv")) == (4, 4)
    assert (second.count("send"), second.count("recv")) == (4, 4)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_zero_redundancy_optimizer_steps() -> None:
    """ZeroRedundancyOptimizer updates its shard and takes the others' by broadcast."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with emulated() as hook:
        model = DistributedDataParallel(_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        _step(model)
        optimizer.step()
        assert "broadcast" in _ops(hook)
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("rank", [0, 3])
def test_distributed_checkpoint_saves_this_ranks_shards(rank: int, tmp_path: Path) -> None:
    """A checkpoint holds this rank's shards; the coordinator can load its own again."""
    import torch.distributed.checkpoint as checkpoint

    with emulated(rank, 4):
        model = fully_shard(_model())
        before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        assert list(tmp_path.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            state = {"model": model.state_dict()}
            checkpoint.load(state, checkpoint_id=tmp_path)
            for ours, kept in zip(model.parameters(), before, strict=True):
                assert torch.equal(ours.to_local(), kept)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_rank_of_65536_builds_its_mesh_and_trains() -> None:
    """Rank 17 of 65,536 makes a 3-D mesh of all ranks and takes a step of FSDP2 and TP."""
    with emulated(17, 65_536, None) as hook:
        mesh = dist.init_device_mesh("cpu", (16, 512, 8), mesh_dim_names=("pp", "dp", "tp"))
        model = _model()
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        _step(model)
        assert {c.group.size for c in hook.collectives} == {8, 512}
