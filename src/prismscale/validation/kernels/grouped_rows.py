"""Public measurements of the products of experts, as calls of the null device.

``simumax``: Transformer Engine's grouped products of training on a B200, one after another on a few
streams, forward and both gradients, all experts alike. ``aiconfigurator``: whole layers of experts
of servers for inference, two grouped products and the activation between them, with tokens spread
evenly or by a power law; their kernels are Triton's, CUTLASS's and TensorRT-LLM's. Nothing of
either is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prismscale.errors import UsageError
from prismscale.validation.kernels.measured_calls import MeasuredCalls, call, tensor
from prismscale.validation.kernels.public_tables import (
    AICONFIGURATOR_GPUS,
    SIMUMAX_PEAK,
    simumax_operators,
    simumax_shares,
    table_rows,
)

FEWEST_ROWS = 64
"""Of each expert, in a batch of training."""
_STAGES = {"fwd": "forward", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}
_MAIN_GRADS = {"fp32": "Float", "bf16": "BFloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRow(MeasuredCalls):
    """One measurement, and how its tokens were spread."""

    is_even: bool
    """All experts get as many tokens."""
    rows: float
    """Of each expert, on average."""
    sustained: bool


def load_grouped(truth: Path) -> list[GroupedRow]:
    """All rows below ``truth``.

    Raises:
        UsageError: the folder has none.
    """
    paths = sorted((truth / "aiconfigurator").glob("*__moe_perf__*.csv.gz"))
    simumax = simumax_operators(truth)
    rows = [row for path in paths for row in _layers(path)]
    rows += _trained(simumax) if simumax.exists() else []
    if not rows:
        raise UsageError(
            f"no products of experts below '{truth}': expected aiconfigurator/"
            "*__moe_perf__*.csv.gz or simumax_b200/measured_operators.json"
        )
    return rows


def _trained(path: Path) -> Iterator[GroupedRow]:
    for stated, share in simumax_shares(path, "group_matmul"):
        experts, m, n, k = (int(stated[e]) for e in ("ng", "M", "N", "K"))
        yield GroupedRow(
            gpu="b200",
            group=f"{_STAGES[stated['stage']]}, Transformer Engine",
            is_even=True,
            signatures=(_engine_call(stated, experts, (m, n, k)),),
            time_ns=1e9 * 2 * experts * m * n * k / (share * SIMUMAX_PEAK),
            rows=m,
            sustained=True,
        )


def _engine_call(stated: Mapping[str, str], experts: int, sizes: tuple[int, int, int]) -> str:
    """As the stand-in of Transformer Engine writes it."""
    m, n, k = sizes
    tokens, results = tensor("BFloat16", experts * m, k), tensor("BFloat16", experts * m, n)
    weights = tensor("BFloat16", experts, n, k)
    grads = tensor(_MAIN_GRADS[stated["main_grad_dtype"]], experts, n, k)
    product, reads, writes = {
        "fwd": ((m, n, k), [weights, tokens], [results]),
        "bwd_grad_act": ((m, k, n), [weights, results], [tokens]),
        "bwd_grad_w": ((n, k, m), [tokens, results], [grads]),
    }[stated["stage"]]
    if stated["accumulate"] == "True":
        reads = [*reads, *writes]
    extents = ",".join(map(str, (1, *product) * experts))
    arguments = f"extents={extents};launches={experts};bits=16"
    return call("transformer_engine::grouped_gemm.gemm", reads, writes, arguments)


def _layers(path: Path) -> Iterator[GroupedRow]:
    gpu = AICONFIGURATOR_GPUS.get(path.name.split("_")[0])
    for row in table_rows(path):
        # What a rank of an expert-parallel group was given is not stated.
        if gpu is None or row["moe_dtype"] != "bfloat16" or row["moe_ep_size"] != "1":
            continue
        experts, topk = int(row["num_experts"]), int(row["topk"])
        rows = int(row["num_tokens"]) * topk
        width, inner = int(row["hidden_size"]), int(row["inter_size"]) // int(row["moe_tp_size"])
        yield GroupedRow(
            gpu=gpu,
            group=_kernel(row["kernel_source"]),
            is_even=row["distribution"] == "balanced",
            signatures=tuple(_layer(rows, experts, width, inner)),
            time_ns=1e6 * float(row["latency_ms"]),
            rows=rows / experts,
            sustained=False,
        )


def _kernel(source: str) -> str:
    return next(name for name in ("triton", "cutlass", "trtllm", source) if name in source)


def _layer(rows: int, experts: int, width: int, inner: int) -> Iterator[str]:
    """Both projections at once, the gated activation, and the way back."""
    tokens, offsets = tensor("BFloat16", rows, width), tensor("Int", experts)
    gated, activated = tensor("BFloat16", rows, 2 * inner), tensor("BFloat16", rows, inner)
    up, down = (
        tensor("BFloat16", experts, width, 2 * inner),
        tensor("BFloat16", experts, inner, width),
    )
    yield call("_grouped_mm", [tokens, up, offsets], [gated])
    yield call("silu", [gated], [activated])
    yield call("_grouped_mm", [activated, down, offsets], [tokens])
