"""Megatron-LM's own ``pretrain_gpt.py``, unmodified, with flags of production, 64 and 1,024 ranks.

    python bench/megatron_lm.py --megatron DIR [--case NAME]… [--json PATH]

DIR is a checkout of Megatron-LM, which is on no package index (core_v0.16.1 for the rows in
``results``). The Python of this bench is that of ``scripts/megatron-environment``, with Transformer
Engine 2.11.0 on ``PYTHONPATH`` (docs/null-device.md). Flags are
those of the repository's own scripts, with mock data in place of files: ``examples/llama`` (Llama-3
8B with FP8), ``examples/mixtral`` and ``megatron/core/transformer/moe/README.md`` (Mixtral 8x7B),
``tests/functional_tests/test_cases/mixtral`` (a DeepSeek-V3). Where a script leaves a number to its
user (ranks, tokens in a step), it is here; at 64 ranks models have fewer layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from null_programs import GIB, reserved_bytes
from prismscale.analysis.emulated import KernelKind, coverage
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from runs import Runs, folder_name, our_commit

LIMIT_S = 5400
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

SHARED = """--use-mcore-models --bf16 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --sequence-parallel --use-flash-attn
    --untie-embeddings-and-output-weights --disable-bias-linear --swiglu
    --position-embedding-type rope --attention-dropout 0.0
    --hidden-dropout 0.0 --micro-batch-size 1 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine --train-iters 50
    --lr-warmup-iters 10 --cross-entropy-loss-fusion --manual-gc --mock-data
    --tokenizer-type NullTokenizer --split 99,1,0 --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --num-workers 1 --log-interval 1 --log-throughput --eval-iters 32
    --eval-interval 100 --save-interval 1000 --ckpt-format torch_dist
    --distributed-timeout-minutes 60"""
LLAMA = """--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
    --max-position-embeddings 8192 --rotary-base 1000000 --rotary-percent 1.0
    --init-method-std 0.0134 --vocab-size 128256"""
LLAMA_8B = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --attention-backend fused --apply-layernorm-1p --grad-reduce-in-bf16 --calculate-per-token-loss
    --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --empty-unused-memory-level 1
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
    --fp8-param-gather"""
LLAMA_70B = """--hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --normalization RMSNorm --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"""
MIXTRAL = """--seq-length 4096 --max-position-embeddings 32768 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --normalization RMSNorm
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding
    --rotary-base 1000000 --vocab-size 32000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-permute-fusion --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8"""
DEEPSEEK = """--enable-experimental --cross-entropy-fusion-impl te --seq-length 4096
    --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --max-position-embeddings 4096 --rotary-base 10000 --make-vocab-size-divisible-by 3232
    --vocab-size 129280 --normalization RMSNorm --norm-epsilon 1e-6 --multi-latent-attention
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --qk-layernorm --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss
    --moe-router-topk 8 --moe-token-dispatcher-type alltoall --moe-router-pre-softmax
    --moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4
    --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --init-method-std 0.02 --no-check-for-nan-in-loss-and-grad --log-num-zeros-in-grad
    --log-params-norm --expert-tensor-parallel-size 1"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model at one layout."""

    name: str
    world_size: int
    options: tuple[str, ...]

    @property
    def title(self) -> str:
        """For rows."""
        return f"{self.name}, {self.world_size:,} ranks"


def case(name: str, world_size: int, *options: str) -> Case:
    """With the flags that all share."""
    return Case(
        name=name,
        world_size=world_size,
        options=tuple(word for text in (SHARED, *options) for word in text.split()),
    )


def llama_8b(world_size: int, batch: int, context: int = 1) -> Case:
    """The example's own layout: data parallelism, and context parallelism where its user asks."""
    size = f"--global-batch-size {batch} --context-parallel-size {context}"
    name = "Llama-3 8B, FP8, DP" + (f", CP {context}" if context > 1 else "")
    return case(name, world_size, LLAMA, LLAMA_8B, size)


def llama_70b(world_size: int, layers: int, per_chunk: int, batch: int) -> Case:
    """Tensor parallelism in a node, an interleaved pipeline across nodes."""
    size = f"--num-layers {layers} --num-layers-per-virtual-pipeline-stage {per_chunk}"
    name = f"Llama-3 70B, {layers} layers, TP 8, PP 4, VPP {layers // (4 * per_chunk)}"
    return case(name, world_size, LLAMA, LLAMA_70B, size, f"--global-batch-size {batch}")


def mixtral(world_size: int, layers: int, per_chunk: int, batch: int) -> Case:
    """Experts over a node, an interleaved pipeline across nodes."""
    size = f"--num-layers {layers} --num-layers-per-virtual-pipeline-stage {per_chunk}"
    name = f"Mixtral 8x7B, {layers} layers, EP 8, PP 4, VPP {layers // (4 * per_chunk)}"
    return case(name, world_size, MIXTRAL, size, f"--global-batch-size {batch}")


def deepseek(before: str, after: str, *options: str, tensor: int, batch: int) -> Case:
    """All layers, experts over eight nodes; ``before`` and ``after`` complete the name."""
    size = f"""--num-layers 61 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
        --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size 16
        --pipeline-model-parallel-layout Et*3|(tt|)*29m|L --expert-model-parallel-size 64"""
    name = f"DeepSeek-V3, 61 layers and MTP, {before}EP 64, PP 16, VPP 2{after}"
    return case(name, 1024, DEEPSEEK, size, *options, f"--global-batch-size {batch}")


CASES = (
    llama_8b(64, 128),
    llama_8b(64, 128, context=2),
    llama_8b(1024, 1024),
    llama_8b(1024, 1024, context=2),
    llama_70b(64, 16, 2, 16),
    llama_70b(1024, 80, 5, 256),
    mixtral(64, 8, 1, 128),
    mixtral(1024, 32, 4, 1024),
    case(
        "DeepSeek-V3, 14 layers and MTP, TP 2, EP 16, PP 4, VPP 2",
        64,
        DEEPSEEK,
        """--num-layers 14 --num-experts 64 --moe-layer-freq ([0]*3+[1]*11)
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
        --pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL --expert-model-parallel-size 16
        --global-batch-size 64""",
    ),
    deepseek("", "", tensor=1, batch=2048),
    # The layout that Megatron-Bridge's recipe for 1,024 H100 recommends.
    deepseek(
        "TP 2, ",
        ", selective recomputation",
        "--recompute-granularity selective --recompute-modules mla_up_proj mlp",
        tensor=2,
        batch=1024,
    ),
)


def files(folder: Path) -> tuple[object, ...]:
    """Options that say where Megatron-LM leaves what it writes."""
    return ("--data-cache-path", folder / "data", "--tensorboard-dir", folder / "tensorboard")


def measure(chosen: Case, script: Path, runs: Runs) -> list[Row]:
    """Run one case through the command line."""
    out = folder_name(chosen.title)
    found = runs.null(out, chosen.world_size, (script, *chosen.options, *files(runs.folder)))
    note = f"prismscale {our_commit()}"
    if not found:
        missed = Row.at_least(f"{chosen.title}: completes", 0, 1)
        return [replace(missed, note=f"{note}; {runs.reason}")]
    stages = found["stages"]
    kernels = coverage(KernelKind(**kernel) for kernel in found["kernels"])
    reserved = reserved_bytes(runs.folder / out, found["captured"]) / GIB
    peak = max(stage["peak_bytes"] or 0 for stage in stages) / GIB
    rows = (
        Row.at_least(f"{chosen.title}: completes", 1, 1),
        Row.told(f"{chosen.title}: step", found["step_ns"] / 1e6, "ms"),
        Row.told(f"{chosen.title}: peak", peak, "GiB"),
        Row.told(f"{chosen.title}: reserved", reserved, "GiB"),
        Row.at_least(f"{chosen.title}: kernel time from rules of cost", kernels, 0.99),
        Row.told(f"{chosen.title}: captured ranks", len(found["captured"])),
        Row.told(f"{chosen.title}: wall time", sum(found["wall_s"].values()), "s"),
    )
    return [replace(row, note=note) for row in rows]


def main() -> int:
    """Run the cases, print the table, and write it where asked; returns the exit code."""
    options = _arguments()
    chosen = [c for c in CASES if any(part in c.title for part in options.case or [""])]
    titles = {c.title for c in CASES}
    rows = [row for row in read_rows(options.json) if row.subject in titles]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(folder, limit_s=LIMIT_S, environment=ENVIRONMENT)
        for one in chosen:
            found = measure(one, options.megatron.absolute() / "pretrain_gpt.py", runs)
            print(*(f"{r.name}: {r.value:.4g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if options.json:
                write_rows(rows, options.json)
    return finish(rows, title="Megatron-LM's pretrain_gpt.py", json_path=options.json)


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--case", action="append", help="part of a row's name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
