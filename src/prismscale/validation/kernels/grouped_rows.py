"""Public measurements of the products of experts, as calls of the null device.

``simumax``: Transformer Engine's grouped products of training on a B200, one after another on a few
streams, forward and both gradients, with equal load on all experts. Nothing is fitted on them.
``aiconfigurator``: whole layers of experts of servers for inference, with tokens spread evenly or
by a power law: two grouped products, the activation between them, and the sum over a token's
experts. The kernels are those of Triton, CUTLASS and TensorRT-LLM. ``tools/fit/fit_experts.py``
fits them, on families that are not held out and have evenly spread tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prismscale.cost.kernel import ModelledKernels
from prismscale.errors import UsageError
from prismscale.validation.kernels.held_out import HeldOut
from prismscale.validation.kernels.measured_calls import MeasuredCalls, call, tensor
from prismscale.validation.kernels.measuring_programs import Harness, Harnesses
from prismscale.validation.kernels.public_tables import (
    AICONFIGURATOR_GPUS,
    SIMUMAX_PEAK,
    simumax_operators,
    simumax_shares,
    table_rows,
)

LIBRARIES = {
    "triton": "aiconfigurator_moe",
    "cutlass": "aiconfigurator_moe_cutlass",
    "trtllm": "aiconfigurator_moe",
}
"""The set in which families are held out, for each library with constants of its own."""
FEWEST_ROWS = 64
"""Fewest rows of each expert in a batch of training."""
_STAGES = {"fwd": "forward", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}
_MAIN_GRADS = {"fp32": "Float", "bf16": "BFloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRow(MeasuredCalls):
    """One measurement, and how its tokens were spread."""

    is_even: bool
    """Whether all experts get equally many tokens."""
    rows: float
    """Mean number of rows per expert."""
    sustained: bool
    held_out: bool
    """Whether no constant was fitted on its family."""
    overhead_ns: float = 0.0
    """Overhead of the measuring program."""

    def predicted_ns(self, model: ModelledKernels) -> int:
        """Return the predicted time of the kernels, plus the measuring program's overhead."""
        return super(GroupedRow, self).predicted_ns(model) + round(self.overhead_ns)


def load_grouped(truth: Path) -> list[GroupedRow]:
    """Load all rows below ``truth``.

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
            held_out=True,
        )


def _engine_call(stated: Mapping[str, str], experts: int, sizes: tuple[int, int, int]) -> str:
    """Return the signature that the stand-in of Transformer Engine writes."""
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
    held_out, programs = HeldOut.load(), Harnesses.load().experts
    for row in table_rows(path):
        # With expert parallelism, the tables do not state which tokens a rank was given.
        if gpu is None or row["moe_dtype"] != "bfloat16" or row["moe_ep_size"] != "1":
            continue
        layer = Layer.of(row)
        family = f"hidden={layer.width},inter={row['inter_size']},experts={layer.experts}"
        families = LIBRARIES.get(layer.library)
        is_free = families is not None and not held_out.holds(families, family)
        yield GroupedRow(
            gpu=gpu,
            group=layer.library,
            is_even=row["distribution"] == "balanced",
            signatures=tuple(layer.calls()),
            time_ns=1e6 * float(row["latency_ms"]),
            rows=layer.rows / layer.experts,
            sustained=False,
            held_out=not is_free,
            overhead_ns=programs.get(f"{gpu} {layer.library}", Harness()).overhead_ns,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer of gated experts."""

    library: str
    """Library of its products."""
    tokens: int
    choices: int
    """Number of experts of each token."""
    experts: int
    width: int
    inner: int

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Layer:
        """Return the layer of a row of aiconfigurator's tables."""
        source = row["kernel_source"]
        return cls(
            library=next((name for name in LIBRARIES if name in source), source),
            tokens=int(row["num_tokens"]),
            choices=int(row["topk"]),
            experts=int(row["num_experts"]),
            width=int(row["hidden_size"]),
            inner=int(row["inter_size"]) // int(row["moe_tp_size"]),
        )

    @property
    def rows(self) -> int:
        """Number of rows of all experts together."""
        return self.tokens * self.choices

    def calls(self) -> Iterator[str]:
        """Yield the calls of the layer.

        These are both input projections at once, the gated activation, the output projection, and
        the sum over a token's experts."""
        tokens = tensor("BFloat16", self.rows, self.width)
        gated = tensor("BFloat16", self.rows, 2 * self.inner)
        activated = tensor("BFloat16", self.rows, self.inner)
        yield self._product(tokens, gated, self.width, 2 * self.inner)
        yield call("silu", [gated], [activated])
        yield self._product(activated, tokens, self.inner, self.width)
        chosen = tensor("BFloat16", self.tokens, self.choices, self.width)
        yield call("sum", [chosen], [tensor("BFloat16", self.tokens, self.width)])

    def _product(self, reads: str, writes: str, inner: int, columns: int) -> str:
        # With fewer rows than experts, the weights of the other experts are not read.
        experts = min(self.experts, self.rows)
        weights = tensor("BFloat16", experts, inner, columns)
        rows = math.ceil(self.rows / experts)
        arguments = f"extents={experts},{rows},{columns},{inner};launches=1;bits=16"
        return call(f"{self.library}::experts.gemm", [reads, weights], [writes], arguments)
