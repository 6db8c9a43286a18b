"""Programs of ``null_matrix.py`` by the commands of their users, at 64 ranks.

torchtitan 0.3.0 runs as ``-m torchtitan.train`` with the models and defaults of its own registry.
It was written for torch 2.15; on an older one it asks for the flags that :data:`runs.PARTIAL` has.
It is given a tokenizer and a text of this machine, because nothing is downloaded. Hugging Face's,
Lightning's and DeepSpeed's trainers are called as their documentation calls them (``programs``).
"""

from __future__ import annotations

from matrix_cases import Case
from prismscale.torch_versions import installed_torch, release_of
from runs import HERE, PARTIAL

RANKS = 64
WRITTEN_FOR = (2, 15)
"""The torch of torchtitan 0.3.0."""
_INPUTS = ("--hf_assets_path", "./tokenizer", "--dataloader.dataset", "c4_test")


def titan(name: str, module: str, config: str, *more: str, package: str = "torchtitan") -> Case:
    """A configuration of torchtitan's, as it is."""
    is_older = (release_of(installed_torch()) or WRITTEN_FOR) < WRITTEN_FOR
    return Case(
        name=f"torchtitan, its own command: {name}",
        package=package,
        world_size=RANKS,
        script="torchtitan.train",
        args=(
            *("--module", module, "--config", config, *_INPUTS),
            *(PARTIAL if is_older else ()),
            *("--training.steps", "6", *more),
        ),
    )


def trainer(name: str, package: str, program: str, *args: str) -> Case:
    """A program of ``programs``."""
    return Case(
        name=name,
        package=package,
        world_size=RANKS,
        script=HERE / "programs" / f"{program}.py",
        args=args,
    )


_TENSOR = ("--parallelism.tensor_parallel_degree", "8")
PROGRAMS = (
    titan("Llama-3 8B", "llama3", "llama3_8b"),
    titan("DeepSeek-V3 16B", "deepseek_v3", "deepseek_v3_16b"),
    titan("Qwen3 30B-A3B", "qwen3", "qwen3_30b_a3b"),
    # The longest document of a batch is an argument of its attention, and torchtitan refuses to
    # replay a CUDA graph whose arguments have changed, on a GPU as here.
    titan("gpt-oss 20B", "gpt_oss", "gpt_oss_20b", "--training.disable_cuda_graphs"),
    titan("float8", "llama3", "llama3_debugmodel_float8", package="torchao"),
    titan("Llama-3 70B, async TP", "llama3", "llama3_70b", *_TENSOR, "--compile.enable"),
    trainer("FSDP1", "torch", "fsdp1"),
    trainer("Lightning, FSDP", "lightning", "lightning_fsdp"),
    trainer("TRL, supervised fine-tuning", "trl", "trl_sft"),
    trainer("TRL, 8-bit optimizer", "bitsandbytes", "trl_sft", "--optim", "adamw_8bit"),
    trainer("DeepSpeed, pipeline", "deepspeed", "deepspeed_pipeline"),
    trainer("DeepSpeed, pipeline, its own Adam", "deepspeed", "deepspeed_pipeline", "--fused-adam"),
)
