"""Programs of ``one_truth``: as people run them, on null H100s and on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runs import EXAMPLES, HERE, PARTIAL, TITAN, Program, Runs, is_installed

LOOP = HERE / "programs" / "fsdp_events.py"
WORLD = 64


@dataclass(frozen=True, kw_only=True)
class Logging(Program):
    """A program that logs as often as asked."""

    log_option: str

    def logging(self, every: int) -> tuple[object, ...]:
        """Its script and arguments."""
        return (self.script, *self.args, self.log_option, every)


def titan(name: str, world_size: int, config: str, *more: str) -> Logging:
    """torchtitan with a real model's shape."""
    return Logging(
        name=f"torchtitan {name}",
        package="torchtitan",
        world_size=world_size,
        script=TITAN,
        args=(
            *("--module", "titan_configs", "--config", config),
            *("--hf_assets_path", "./tokenizer", "--dataloader.dataset", "c4_test"),
            *PARTIAL,
            *("--training.steps", "400", *more),
        ),
        log_option="--metrics.log_freq",
    )


def example(name: str, package: str, world_size: int, folder: str, options: str) -> Logging:
    """One of the examples."""
    return Logging(
        name=name,
        package=package,
        world_size=world_size,
        script=EXAMPLES / folder / "train.py",
        args=tuple(options.split()),
        log_option="--log-every",
    )


PROGRAMS = (
    Logging(
        name="own FSDP2 loop",
        package="torch",
        world_size=WORLD,
        script=LOOP,
        args=("--steps", "200"),
        log_option="--log-every",
    ),
    example("DDP", "torch", WORLD, "ddp", "--hidden 4096 --batch-size 8192 --steps 200"),
    titan("8B", 8, "llama3_8b_2024", "--training.local_batch_size", "1"),
    titan("70B, TP 8", 64, "llama3_70b", "--parallelism.tensor_parallel_degree", "8"),
    example(
        "Megatron, TP 2 PP 2",
        "megatron",
        WORLD,
        "megatron",
        """--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16
        --micro-batch-size 1 --train-iters 200 --vocab-size 32000 --attention-dropout 0
        --no-masked-softmax-fusion --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --global-batch-size 128""",
    ),
    example(
        "DeepSpeed ZeRO-3",
        "deepspeed",
        16,
        "deepspeed",
        """--steps 200 --zero 3 --layers 4 --hidden 1024 --heads 16 --seq-length 1024
        --vocabulary 32000""",
    ),
    example(
        "Hugging Face, accelerate, FSDP2",
        "accelerate",
        16,
        "accelerate",
        "--steps 200 --bf16 --layers 4 --hidden 1024 --heads 16 --seq-length 1024",
    ),
)


def user_runs(runs: Runs) -> dict[str, Callable[[str], dict[str, Any]]]:
    """Runs as users make them; those of packages that are missing left out."""
    llama = EXAMPLES / "llama" / "train.py"
    demo = "--model debug --tp 8 --pp 4 --dp-mode fsdp2 --microbatches 8 --steps 40"
    by_name = {p.name: p for p in PROGRAMS}

    def of(program: Logging) -> Callable[[str], dict[str, Any]]:
        return lambda folder: runs.null(folder, program.world_size, program.logging(10))

    found: dict[str, Callable[[str], dict[str, Any]]] = {
        "README's demo, CPU, 1,024 ranks": lambda folder: runs.run(
            folder, ("--world-size", 1024, "--cluster", "h100-sxm"), (llama, *demo.split())
        ),
        "llama, CPU, scaled and slow": lambda folder: runs.run(
            folder,
            ("--world-size", 64, "--compute-scale", 0.2, "--slow", "3=2.0"),
            (llama, "--model", "debug", "--tp", 8, "--pp", 2, "--microbatches", 4, "--steps", 40),
        ),
        "DDP, null": of(by_name["DDP"]),
        "own FSDP2 loop, null, live": lambda folder: runs.null(
            folder, WORLD, (LOOP, "--log-every", 10), "--live", "0,8"
        ),
        "torchtitan 70B, 256 ranks": lambda folder: runs.null(
            folder, 256, (TITAN, *by_name["torchtitan 70B, TP 8"].args)
        ),
        "torchtitan 8B, 64 ranks, TP 8": lambda folder: runs.null(
            folder,
            64,
            (
                *(TITAN, *titan("8B", 64, "llama3_8b_whole_loss").args),
                *("--parallelism.tensor_parallel_degree", 8),
            ),
        ),
        "torchtitan 8B, 8,192 ranks": wide(runs, 8192),
        "torchtitan 405B, 512 ranks, interleaved 1F1B": large(runs),
        "DeepSpeed ZeRO-3": of(by_name["DeepSpeed ZeRO-3"]),
        "Megatron, TP 2 PP 2": of(by_name["Megatron, TP 2 PP 2"]),
    }
    needs = {"torchtitan": "torchtitan", "DeepSpeed": "deepspeed", "Megatron": "megatron"}
    missing = [k for k, package in needs.items() if not is_installed(package)]
    return {n: make for n, make in found.items() if not n.startswith(tuple(missing) or ("\0",))}


def wide(runs: Runs, world_size: int) -> Callable[[str], dict[str, Any]]:
    """torchtitan 8B, TP 8, FSDP 64, replicated over the rest."""
    replicas = world_size // 512
    script = (
        *(TITAN, *titan("8B", 8, "llama3_8b_whole_loss").args),
        *("--parallelism.tensor_parallel_degree", 8),
        *("--parallelism.data_parallel_replicate_degree", replicas),
        *("--training.local_batch_size", 1, "--metrics.log_freq", 10),
    )
    return lambda folder: runs.null(folder, world_size, script)


def large(runs: Runs) -> Callable[[str], dict[str, Any]]:
    """torchtitan 405B, TP 8, PP 8, FSDP 8, with the interleaved schedule."""
    script = (
        *(TITAN, *titan("405B", 512, "llama3_405b_bf16").args),
        *("--parallelism.tensor_parallel_degree", 8, "--parallelism.pipeline_parallel_degree", 8),
        *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
        *("--training.local_batch_size", 16, "--metrics.log_freq", 10),
    )
    return lambda folder: runs.null(folder, 512, script)
