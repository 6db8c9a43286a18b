"""Command line of the Megatron example: the subset of Megatron-LM's options that it knows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

FLAGS = (
    "sequence-parallel",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "accumulate-allreduce-grads-in-fp32",
    "fp16",
    "bf16",
    "apply-query-key-layer-scaling",
    "deterministic-mode",
    "swiglu",
    "group-query-attention",
    "untie-embeddings-and-output-weights",
    "disable-bias-linear",
    "no-bias-gelu-fusion",
    "no-masked-softmax-fusion",
    "no-bias-swiglu-fusion",
    "no-rope-fusion",
    "no-gradient-accumulation-fusion",
    "no-check-for-nan-in-loss-and-grad",
    "log-num-zeros-in-grad",
    "moe-grouped-gemm",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "use-tp-pp-dp-mapping",
)
INTEGERS = {
    "num-layers": None,
    "hidden-size": None,
    "num-attention-heads": None,
    "seq-length": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "ffn-hidden-size": 0,
    "kv-channels": 0,
    "num-query-groups": 0,
    "max-position-embeddings": 0,
    "train-iters": 10,
    "vocab-size": 50257,
    "make-vocab-size-divisible-by": 128,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "num-layers-per-virtual-pipeline-stage": 0,
    "num-virtual-stages-per-pipeline-rank": 0,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": 0,
    "num-experts": 0,
    "moe-router-topk": 2,
    "recompute-num-layers": 1,
    "rotary-base": 10000,
    "seed": 1234,
    "log-every": 1,
}
NUMBERS = {
    "lr": 1.5e-4,
    "weight-decay": 0.01,
    "clip-grad": 1.0,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "init-method-std": 0.02,
    "moe-aux-loss-coeff": 0.0,
}
CHOICES = {
    "attention-backend": ("auto", "flash", "fused", "unfused", "local"),
    "transformer-impl": ("local", "transformer_engine"),
    "cuda-graph-impl": ("none", "local"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "none"),
    "recompute-granularity": ("none", "selective", "full"),
    "recompute-method": ("uniform", "block"),
    "moe-router-load-balancing-type": ("aux_loss", "sinkhorn", "none"),
    "moe-token-dispatcher-type": ("allgather", "alltoall"),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``argv``; exits with status 2 and a message on a layout that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name, default in INTEGERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, required=default is None)
    for name, number in NUMBERS.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    for name, allowed in CHOICES.items():
        parser.add_argument(f"--{name}", choices=allowed, default=allowed[0])
    args = parser.parse_args(argv)
    if args.fp16 and args.bf16:
        parser.error("--fp16 and --bf16 exclude each other")
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    model_parallel *= args.context_parallel_size
    args.sequence_parallel &= args.tensor_model_parallel_size > 1  # as Megatron-LM does
    args.world_size = int(os.environ["WORLD_SIZE"])
    if args.world_size % model_parallel:
        parser.error(f"world size {args.world_size} is not divisible by TP x PP x CP")
    args.data_parallel_size = args.world_size // model_parallel
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % per_step:
        parser.error(
            f"--global-batch-size {args.global_batch_size} is not divisible by "
            f"--micro-batch-size x data-parallel size = {per_step}"
        )
    args.num_microbatches = args.global_batch_size // per_step
    args.virtual_stages = _virtual_stages(args)
    if args.swiglu and not args.ffn_hidden_size:
        # Two input projections: about the parameters of one that is 4 x hidden wide.
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3) // 64 * 64
    tile = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // tile) * tile
    return args


def _virtual_stages(args: argparse.Namespace) -> int | None:
    """Model chunks of a rank; None where the pipeline is not interleaved."""
    stages = int(args.num_virtual_stages_per_pipeline_rank)
    each = args.num_layers_per_virtual_pipeline_stage
    if each and not stages:
        stages = args.num_layers // args.pipeline_model_parallel_size // each
    return stages if stages > 1 else None
