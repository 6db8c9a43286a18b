"""Model shapes by name, the job's layout over its ranks, and the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace


def _require_divisible(name: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} {value} / {by} {divisor}: not divisible")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a Llama-style decoder (embedding and head are not tied)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Key/value heads of grouped-query attention; each serves heads / kv_heads query heads."""
    ffn: int
    """Width of the SwiGLU feed-forward."""
    vocab: int
    seq_len: int
    """Tokens per sample that `--seq-len` defaults to."""
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    experts: int = 0
    """Feed-forwards of each layer that a router chooses from; 0: one, which takes every token."""
    top_k: int = 2
    """Experts of each token."""
    capacity_factor: float = 0.0
    """Rows that an expert takes from each rank, over an equal share; 0: all (dropless)."""
    force_balance: float = 0.0
    """Rows of the first ep rank's experts over an equal share, whatever the router says; 0: what
    the router says."""

    def __post_init__(self) -> None:
        if self.experts and not self.top_k <= self.experts:
            raise ValueError(f"--top-k {self.top_k} of {self.experts} experts: too many")
        if not self.experts and (self.capacity_factor or self.force_balance):
            raise ValueError("--capacity-factor and --force-balance are of experts: give --experts")
        _require_divisible("hidden", self.hidden, "heads", self.heads)
        _require_divisible("heads", self.heads, "kv-heads", self.kv_heads)
        if self.head_dim % 2:
            raise ValueError(f"hidden {self.hidden} / heads {self.heads} must be even for RoPE")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# 160m: JackFram/llama-160m. 1b: Llama 3.2 1B, with a head of its own.
# 8b, 70b, 405b: "The Llama 3 Herd of Models", table 3. 8x7b: "Mixtral of Experts", table 1.
MODELS: dict[str, ModelConfig] = {
    "debug": ModelConfig(
        hidden=64, layers=4, heads=16, kv_heads=8, ffn=192, vocab=256, seq_len=32
    ),
    "tiny": ModelConfig(
        hidden=256, layers=8, heads=8, kv_heads=4, ffn=704, vocab=2048, seq_len=128
    ),
    "160m": ModelConfig(
        hidden=768, layers=12, heads=12, kv_heads=12, ffn=3072, vocab=32000, seq_len=2048,
        rope_theta=10_000.0, norm_eps=1e-6,
    ),
    "1b": ModelConfig(
        hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256, seq_len=8192
    ),
    "8b": ModelConfig(
        hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192
    ),
    "70b": ModelConfig(
        hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq_len=8192
    ),
    "405b": ModelConfig(
        hidden=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq_len=8192
    ),
    "debug-moe": ModelConfig(
        hidden=64, layers=4, heads=16, kv_heads=8, ffn=96, vocab=256, seq_len=32, experts=8
    ),
    "tiny-moe": ModelConfig(
        hidden=256, layers=4, heads=8, kv_heads=4, ffn=512, vocab=2048, seq_len=128, experts=8
    ),
    "8x7b": ModelConfig(
        hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq_len=8192,
        rope_theta=1_000_000.0, experts=8,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the job's ranks are arranged: world size = pp × dp × tp, tp varying fastest. Experts are
    spread over groups of ep ranks that lie side by side on the dp axis."""

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_mode: str = "fsdp2"
    """`ddp`, `fsdp2`, or `none` (no data parallelism)."""
    sequence_parallel: bool = False
    """Shard norms and residuals over the tp axis, by sequence."""
    schedule: str = "1f1b"
    virtual_stages: int = 1
    """Pipeline stages per rank (more than one only when interleaved)."""

    def __post_init__(self) -> None:
        equation = f"world size {self.world_size} = dp ? × tp {self.tp} × pp {self.pp}"
        if self.world_size % (self.tp * self.pp):
            raise ValueError(f"{equation}: not divisible")
        if self.dp % self.ep:
            raise ValueError(f"{equation}: dp {self.dp} / ep {self.ep} is not a whole number")
        if self.ep > 1 and self.dp_mode != "fsdp2":
            raise ValueError(
                f"--dp-mode {self.dp_mode} with --ep {self.ep}: ranks have different experts; "
                "choose --dp-mode fsdp2"
            )
        if self.dp_mode == "none" and self.dp > 1:
            raise ValueError(f"{equation}: leaves dp {self.dp}; choose --dp-mode ddp or fsdp2")
        if self.ddp_hides_shards and self.pp > 1:
            raise ValueError(
                f"--dp-mode ddp with --tp {self.tp} and --pp {self.pp}: DistributedDataParallel "
                "hides tensor-parallel parameters from the pipeline, which must scale their "
                "gradients; choose --dp-mode fsdp2"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("--sequence-parallel shards over the tp axis: give --tp 2 or more")
        if self.schedule == "interleaved" and (self.pp == 1 or self.virtual_stages == 1):
            raise ValueError("--schedule interleaved: give --pp and --virtual-stages 2 or more")
        if self.schedule != "interleaved" and self.virtual_stages > 1:
            raise ValueError(
                f"--virtual-stages {self.virtual_stages}: only with --schedule interleaved"
            )

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def ddp_hides_shards(self) -> bool:
        """Whether DDP replaces tensor-parallel (DTensor) parameters by their local shards."""
        return self.dp_mode == "ddp" and self.dp > 1 and self.tp > 1

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole job."""
        return self.pp * self.virtual_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training job: a model, a layout, and the shape and number of its steps."""

    model: ModelConfig
    layout: Layout
    seq_len: int
    batch_size: int
    """Samples in one microbatch of one data-parallel rank."""
    microbatches: int
    """Microbatches in a step: through the pipeline, or accumulated without one."""
    steps: int = 10
    lr: float = 3e-4
    clip_grad: float = 0.0
    """Largest gradient norm; 0 for no clipping."""
    dtype: str = "fp32"
    """Dtype of computation; parameters and optimizer state stay fp32."""
    device: str | None = None
    seed: int = 0
    log_every: int = 1
    log_rank: int | None = None

    def __post_init__(self) -> None:
        model, layout = self.model, self.layout
        for name in ("heads", "kv_heads", "ffn", "vocab"):
            _require_divisible(name.replace("_", "-"), getattr(model, name), "tp", layout.tp)
        self._check_experts()
        if layout.sequence_parallel:
            _require_divisible("seq-len", self.seq_len, "tp", layout.tp)
        if layout.ddp_hides_shards and self.clip_grad > 0:
            raise ValueError(
                f"--clip-grad with --dp-mode ddp and --tp {layout.tp}: DistributedDataParallel "
                "hides which gradients are sharded over tp; choose --dp-mode fsdp2"
            )
        if model.layers < layout.stages:
            raise ValueError(f"layers {model.layers} are too few for {layout.stages} stages")
        if layout.pp > 1 and layout.schedule == "1f1b" and self.microbatches < layout.pp:
            raise ValueError(
                f"1f1b needs a microbatch per stage: microbatches {self.microbatches} "
                f"< pp {layout.pp}"
            )
        rounds = max(1, self.microbatches // layout.pp)
        if layout.schedule == "interleaved" and self.microbatches % rounds:
            raise ValueError(
                f"interleaved runs {rounds} rounds of pp {layout.pp} microbatches: "
                f"microbatches {self.microbatches} / rounds {rounds} is not a whole number"
            )
        if self.log_rank is not None and not 0 <= self.log_rank < layout.world_size:
            raise ValueError(
                f"--log-rank {self.log_rank}: not a rank of world size {layout.world_size}"
            )

    def _check_experts(self) -> None:
        model, layout = self.model, self.layout
        if layout.ep > 1 and not model.experts:
            raise ValueError(f"--ep {layout.ep} spreads experts over ranks: give --experts")
        if model.experts and layout.tp > 1:
            raise ValueError(f"--experts with --tp {layout.tp}: experts are not sharded over tp")
        _require_divisible("experts", model.experts, "ep", layout.ep)
        if model.force_balance:
            most = min(layout.ep, model.experts / model.top_k)
            if layout.ep == 1 or not 0 < model.force_balance <= most:
                raise ValueError(
                    f"--force-balance {model.force_balance:g} with --ep {layout.ep} and "
                    f"top {model.top_k} of {model.experts} experts: from 0 to {most:g}, with "
                    "--ep 2 or more"
                )

    @property
    def samples_per_rank(self) -> int:
        """Samples that one data-parallel rank sees in a step."""
        return self.batch_size * self.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens that the whole job sees in a step."""
        return self.samples_per_rank * self.layout.dp * self.seq_len

    @property
    def printing_rank(self) -> int:
        """The rank that prints: by default the first of the last stage, which has the loss."""
        if self.log_rank is not None:
            return self.log_rank
        return self.layout.world_size - self.layout.world_size // self.layout.pp


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The trainer's options."""
    parser = argparse.ArgumentParser(
        description="Train a Llama-style decoder on synthetic tokens.",
        usage="torchrun --nproc-per-node N examples/llama/train.py [options]",
    )
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=MODELS, default="debug", help="shape (default: debug)")
    for name in _MODEL_OVERRIDES:
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=_positive, metavar="N", help="override the model's")

    for name in _EXPERT_OVERRIDES:
        option = "--" + name.replace("_", "-")
        kind = float if isinstance(getattr(MODELS["debug"], name), float) else int
        group.add_argument(option, type=kind, metavar="N", help=_EXPERT_OVERRIDES[name])

    group = parser.add_argument_group("batch")
    group.add_argument("--seq-len", type=_positive, metavar="N", help="override the model's")
    group.add_argument(
        "--batch-size",
        type=_positive,
        default=1,
        metavar="N",
        help="samples per microbatch and data-parallel rank",
    )
    group.add_argument(
        "--microbatches",
        type=_positive,
        metavar="N",
        help="per step: pipelined, or accumulated (default: one per pp rank)",
    )

    group = parser.add_argument_group("layout (dp = world size / (tp × pp), a multiple of ep)")
    group.add_argument("--tp", type=_positive, default=1, metavar="N", help="tensor parallel")
    group.add_argument("--pp", type=_positive, default=1, metavar="N", help="pipeline parallel")
    group.add_argument("--ep", type=_positive, default=1, metavar="N", help="expert parallel")
    group.add_argument("--dp-mode", choices=("ddp", "fsdp2", "none"), default="fsdp2")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--schedule", choices=("1f1b", "interleaved", "gpipe"), default="1f1b")
    group.add_argument(
        "--virtual-stages",
        type=_positive,
        metavar="N",
        help="stages per rank (default: 2 when interleaved, else 1)",
    )

    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=_positive, default=10, metavar="N")
    group.add_argument("--lr", type=float, default=3e-4)
    group.add_argument("--clip-grad", type=float, default=0.0, metavar="NORM", help="0: off")
    group.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--log-every", type=_positive, default=1, metavar="N")
    group.add_argument(
        "--log-rank",
        type=int,
        metavar="RANK",
        help="rank that prints (default: the first of the last pipeline stage)",
    )
    return parser  # fmt: skip


_MODEL_OVERRIDES = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
_EXPERT_OVERRIDES = {
    "experts": "experts of each layer (0: none, as llama has it)",
    "top_k": "experts of each token",
    "capacity_factor": "rows that an expert takes, over an equal share (0: all, dropless)",
    "force_balance": "rows of the first ep rank over an equal share, whatever the router says",
}


def parse_args(argv: Sequence[str] | None = None) -> TrainConfig:
    """The job that the command line and torchrun's `WORLD_SIZE` describe; exits when wrong."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        parser.error("WORLD_SIZE is not set: start with torchrun")
    interleaved = args.schedule == "interleaved"
    overrides = {
        name: getattr(args, name)
        for name in (*_MODEL_OVERRIDES, *_EXPERT_OVERRIDES)
        if getattr(args, name) is not None
    }
    try:
        model = replace(MODELS[args.model], **overrides)
        return TrainConfig(
            model=model,
            layout=Layout(
                world_size=int(os.environ["WORLD_SIZE"]),
                tp=args.tp,
                pp=args.pp,
                ep=args.ep,
                dp_mode=args.dp_mode,
                sequence_parallel=args.sequence_parallel,
                schedule=args.schedule,
                virtual_stages=args.virtual_stages or (2 if interleaved else 1),
            ),
            seq_len=args.seq_len or model.seq_len,
            batch_size=args.batch_size,
            microbatches=args.microbatches or args.pp,
            steps=args.steps,
            lr=args.lr,
            clip_grad=args.clip_grad,
            dtype=args.dtype,
            device=args.device,
            seed=args.seed,
            log_every=args.log_every,
            log_rank=args.log_rank,
        )
    except ValueError as error:
        parser.error(str(error))
