"""The programs of ``null_matrix.py``: frameworks at a layout each, with what they have to show.

Models are small. Those of ``own_commands.py`` run by the command that their users give.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prismscale.analysis.emulated import Emulated
from prismscale.cost.kernel_signature import FIELD
from prismscale.validation.rows import Row
from runs import EXAMPLES, HERE, PARTIAL, TITAN, Program


@dataclass(frozen=True, kw_only=True)
class Case(Program):
    """A script of a framework at one layout."""

    more: Callable[[Path], list[Row]] | None = None
    """Rows of its own, from the run folder."""

    def owns(self, row: Row) -> bool:
        """Whether ``row`` is one of this case."""
        return row.name.startswith((f"{self.name}:", f"{self.name}, {self.world_size} ranks:"))


def titan(
    name: str, world_size: int, module: str, config: str, /, *more: str, **layout: object
) -> Case:
    """torchtitan with ``layout`` as its ``--parallelism`` options."""
    pairs = ((f"--parallelism.{key}", str(value)) for key, value in layout.items())
    return Case(
        name=f"torchtitan {name}",
        package="torchtitan",
        world_size=world_size,
        script=TITAN,
        args=(
            *("--module", module, "--config", config, "--hf_assets_path", "./tokenizer"),
            *PARTIAL,
            *("--training.seq_len", "512", "--training.local_batch_size", "4"),
            *("--training.steps", "6", "--metrics.log_freq", "1"),
            *(text for pair in pairs for text in pair),
            *more,
        ),
    )


def megatron(name: str, world_size: int, options: str) -> Case:
    """megatron-core through the example trainer."""
    shape = """--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --bf16
        --micro-batch-size 1 --train-iters 6 --vocab-size 32000 --attention-dropout 0
        --no-masked-softmax-fusion"""
    return Case(
        name=f"megatron-core {name}",
        package="megatron",
        world_size=world_size,
        script=EXAMPLES / "megatron" / "train.py",
        args=(*shape.split(), *options.split()),
    )


def example(
    name: str,
    package: str,
    world_size: int,
    options: str,
    more: Callable[[Path], list[Row]] | None = None,
) -> Case:
    """One of the examples that stands for its framework."""
    return Case(
        name=name,
        package=package,
        world_size=world_size,
        script=EXAMPLES / package / "train.py",
        args=tuple(options.split()),
        more=more,
    )


ZERO_LAYERS, ZERO_HIDDEN, ZERO_VOCABULARY, ZERO_RANKS = 4, 1024, 32_000, 16
ZERO = f"--layers {ZERO_LAYERS} --hidden {ZERO_HIDDEN} --vocabulary {ZERO_VOCABULARY} --heads 16"

CUBLAS_BYTES = 2 * 32 * 2**20
"""Workspaces on Hopper: one for each thread that multiplies, forward and backward."""


def zero_states(out: Path) -> list[Row]:
    """Bytes of rank 0 between two steps, for each parameter of its share, cuBLAS's aside."""
    log = (out / "logs" / "capture-rank-0.log").read_text()
    allocated = int(re.findall(r"allocated (\d+)", log)[-1])
    layer = 4 * ZERO_HIDDEN**2 + 3 * 4 * ZERO_HIDDEN**2 + 2 * ZERO_HIDDEN
    parameters = ZERO_LAYERS * layer + (2 * ZERO_VOCABULARY + 1) * ZERO_HIDDEN
    each = (allocated - CUBLAS_BYTES) * ZERO_RANKS / parameters
    return [Row.told("DeepSpeed, ZeRO-3: held for a parameter (formula 16)", each, "bytes")]


def masked_attention(out: Path, expected: int) -> list[Row]:
    """Whether attention takes a mask: inputs are then four, queries, keys, values and the mask."""
    (path,) = out.glob("captures/*/rank-0.null.json")
    uses = [u for u in Emulated.load(path).kernels if u.kind == "attention"]
    masked = sum(u.calls for u in uses if u.signature.split(FIELD)[1].count(";") == 3)
    name = "Hugging Face Trainer" + (", padded" if expected else "")
    off = abs(masked - expected)
    return [
        Row.told(f"{name}: attention kernels", sum(u.calls for u in uses)),
        Row.at_most(f"{name}: attention kernels with a mask, off by", off, 0),
    ]


def trainer(name: str, *args: str, masked: int) -> Case:
    """Hugging Face's Trainer over four layers."""
    return Case(
        name=name,
        package="transformers",
        world_size=8,
        script=HERE / "trainer_program.py",
        args=args,
        more=partial(masked_attention, expected=masked),
    )


LLAMA = ("llama3", "llama3_debugmodel")
FLASH_LLAMA = ("llama3", "llama3_debugmodel_varlen_attn")
TENSOR, PIPELINE, EXPERT = (f"{axis}_parallel_degree" for axis in ("tensor", "pipeline", "expert"))


def pipelined(schedule: str) -> Case:
    """A Llama in two stages for each rank of the pipeline.

    Without checkpointing: torch refuses a backward in two parts over selectively kept activations.
    With flash attention: compiled FlexAttention gives its buffers away in the backward, and torch
    refuses a second one over it, on a GPU too (torchtitan issue 3584).
    """
    layout = {PIPELINE: 2, "pipeline_parallel_schedule": schedule}
    none = "activation-checkpoint:none"
    return titan(f"Llama-3, PP 2, {schedule}", 16, *FLASH_LLAMA, none, **layout)


PROGRAMS = (
    Case(
        name="DDP with a Triton kernel",
        package="triton",
        world_size=16,
        script=HERE / "triton_program.py",
        args=(),
    ),
    titan(
        "Llama-3, HSDP 2 x 4, TP 2, full checkpointing",
        16,
        *(*LLAMA, "activation-checkpoint:full"),
        **{"data_parallel_replicate_degree": 2, TENSOR: 2},
    ),
    titan(
        "Llama-3, CP 4, FSDP 4, no checkpointing",
        16,
        *(*LLAMA, "activation-checkpoint:none"),
        context_parallel_degree=4,
    ),
    titan("Llama-3, torch.compile", 16, *LLAMA, "--compile.enable"),
    pipelined("InterleavedZeroBubble"),
    pipelined("ZBVZeroBubble"),
    pipelined("DualPipeV"),
    titan("DeepSeek-V3, EP 4", 16, "deepseek_v3", "deepseek_v3_debugmodel", **{EXPERT: 4}),
    titan(
        "DeepSeek-V3, EP 4, TP 2, PP 2",
        32,
        *("deepseek_v3", "deepseek_v3_debugmodel"),
        **{EXPERT: 4, TENSOR: 2, PIPELINE: 2},
    ),
    titan("Qwen3 MoE, EP 4, TP 2", 16, "qwen3", "qwen3_moe_debug", **{EXPERT: 4, TENSOR: 2}),
    megatron(
        "GPT, TP 2, PP 2, VPP 2, distributed optimizer",
        16,
        """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --global-batch-size 16""",
    ),
    megatron(
        "GPT, TP 2, CUDA graphs of its own",
        16,
        """--tensor-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 32
        --cuda-graph-impl local""",
    ),
    megatron(
        "MoE, EP 4, alltoall, distributed optimizer",
        16,
        """--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall
        --use-distributed-optimizer --global-batch-size 32 --disable-bias-linear""",
    ),
    replace(
        megatron(
            "Transformer Engine, TP 2 with sequence parallelism, PP 2",
            64,
            """--transformer-impl transformer_engine --tensor-model-parallel-size 2
            --sequence-parallel --pipeline-model-parallel-size 2 --swiglu --disable-bias-linear
            --normalization RMSNorm --position-embedding-type rope --use-distributed-optimizer
            --global-batch-size 32""",
        ),
        package="transformer_engine",
    ),
    replace(
        megatron(
            "Transformer Engine, MoE, EP 4, alltoall, grouped products",
            16,
            """--transformer-impl transformer_engine --num-experts 8 --moe-grouped-gemm
            --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall
            --use-distributed-optimizer --global-batch-size 32 --disable-bias-linear""",
        ),
        package="transformer_engine",
    ),
    megatron(
        "MoE, EP 4, PP 2, allgather",
        16,
        """--num-experts 8 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2
        --global-batch-size 32 --disable-bias-linear""",
    ),
    trainer("Hugging Face Trainer", masked=0),
    trainer("Hugging Face Trainer, padded", "--padded", masked=4),
    example("accelerate, FSDP2", "accelerate", 16, "--steps 8 --bf16 --checkpointing"),
    example("DeepSpeed, ZeRO-2", "deepspeed", ZERO_RANKS, "--steps 8 --zero 2 --accumulate 2"),
    example(
        "DeepSpeed, ZeRO-3",
        "deepspeed",
        ZERO_RANKS,
        f"--steps 8 --zero 3 --bucket 1e6 {ZERO}",
        zero_states,
    ),
)
