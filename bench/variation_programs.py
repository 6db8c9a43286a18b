"""Jobs of ``variation``: torchtitan's 405B, GPT-3 on Megatron, and a small one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from one_truth_programs import titan
from runs import EXAMPLES, Runs

FIXED = ("--device", "null", "--cluster", "h100-sxm")
SHARD = 1024
"""Ranks over which 405B is sharded at most; beyond, it is replicated."""


@dataclass(frozen=True, kw_only=True)
class NullJob:
    """A program at one size, on null H100s."""

    name: str
    folder: str
    world_size: int
    script: tuple[object, ...]
    bench: str = ""
    """Of MLPerf, whose job this is like."""
    is_scored: bool = True
    """False where a figure of a profile was set anew because of this job's rows."""

    def run(self, runs: Runs, *options: object, out: str = "") -> dict[str, Any]:
        """``prismscale run``, made once; its results, empty where it failed."""
        where = (*FIXED, "--world-size", self.world_size, *options)
        return runs.run(out or self.folder, where, self.script)


def llama_405b(world_size: int) -> NullJob:
    """TP 8, PP 8 interleaved, FSDP over the rest, 16 sequences a replica, bf16."""
    ranks = world_size // 8
    replicas = max(ranks // SHARD, 1)
    script = (
        *(titan("405B", world_size, "llama3_405b_bf16").script,),
        *titan("405B", world_size, "llama3_405b_bf16").args,
        *("--parallelism.tensor_parallel_degree", 8, "--parallelism.pipeline_parallel_degree", 8),
        *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
        *("--training.local_batch_size", 16, "--metrics.log_freq", 10),
        *(("--parallelism.data_parallel_replicate_degree", replicas) if replicas > 1 else ()),
    )
    return NullJob(
        name=f"405B on {world_size:,}",
        folder=f"titan-{world_size}",
        world_size=world_size,
        script=script,
        bench="llama31_405b",
    )


def gpt3(world_size: int, batch: int) -> NullJob:
    """As NVIDIA's MLPerf jobs of 4,096 H100 and more: TP 4, PP 8 interleaved, 16 microbatches of
    one sequence a replica; without FP8 and sequence parallelism. The one on 4,096 showed that the
    tail of links had a trace's warm-up in it."""
    options = f"""--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
        --micro-batch-size 1 --global-batch-size {batch} --vocab-size 51200
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8
        --num-layers-per-virtual-pipeline-stage 2 --bf16 --use-distributed-optimizer
        --train-iters 100 --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion
        --recompute-granularity selective"""
    return NullJob(
        name=f"GPT-3 on {world_size:,}",
        folder=f"gpt3-{world_size}",
        world_size=world_size,
        script=(EXAMPLES / "megatron" / "train.py", *options.split()),
        bench="gpt3",
        is_scored=world_size != 4_096,
    )


SMALL = NullJob(
    name="8B on 64",
    folder="small",
    world_size=64,
    script=(
        EXAMPLES / "llama" / "train.py",
        *["--model", "8b", "--dtype", "bf16", "--tp", "8", "--pp", "4", "--sequence-parallel"],
        *["--microbatches", "8", "--steps", "4"],
    ),
)
"""Eight nodes: all placements of few speeds can be tried."""
