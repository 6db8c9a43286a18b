"""How much work one step of a job is: operations of its model, and tokens that it trains on.

Read off the launches of a null run. The model's operations are three times those of its forward
passes: a backward pass has two products for each of the forward's, and what checkpointing computes
again counts for nothing. So has it the utilisation of Chowdhery et al. (PaLM, arXiv 2204.02311,
appendix B). A masked half of attention is not counted. Tokens are the indices that the gradient of
the largest embedding sums over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prismscale.cost.kernel_attention import attention_flops
from prismscale.cost.kernel_gemm import operand_dtype, products_of
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_signature import KernelCall, parse_signature
from prismscale.cost.launch_log import HOST_ONLY, REPLAYED, LaunchLog, NodePath, load_launch_log
from prismscale.durations.recosting import launches_path
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace

BACKWARD = 2
"""Operations of a model's backward pass over those of its forward pass."""
FORWARD, BACKWARDS = "forward", "backward"
"""Labels of a trace's computation."""
_EMBEDDING = "embedding_dense_backward"
_TENSOR = {"tp", "tensor"}
_OTHER_AXES = {"dp", "data", "cp", "context", "ep", "expert", "pp", "pipeline", "pipe", "fsdp"}
_DTYPES = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
    "Char": "int8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWork:
    """The work of one step over all ranks."""

    flops: float = 0.0
    """Of the model; 0 where forward and backward passes cannot be told apart."""
    dtype: str = ""
    """Torch's name of the element type of most of them."""
    tokens: int = 0
    """0 where no embedding was found."""


@dataclass(kw_only=True)
class _RankWork:
    forward: Counter[str] = field(default_factory=Counter)
    """Operations by element type."""
    tokens: Counter[int] = field(default_factory=Counter)
    """By the rows of the embedding."""


def job_work(graph: JobGraph, captures: Path) -> JobWork:
    """The work of a null run's step.

    Args:
        graph: of the run.
        captures: folder of the traces that it was made of.

    Raises:
        UsageError: a log of launches is not there. FormatError: it is damaged.
    """
    forward: Counter[str] = Counter()
    tokens: dict[int, float] = {}
    for rank_class in graph.classes:
        trace = rank_class.trace
        rank = (trace.facts.longest_of or (trace.rank,))[0]
        own = _rank_work(trace, load_launch_log(launches_path(captures, rank)))
        for dtype, flops in own.forward.items():
            forward[dtype] += flops * rank_class.size
        if own.tokens:
            rows = max(own.tokens)
            # Every rank of a tensor-parallel group reads the same tokens.
            share = own.tokens[rows] * rank_class.size / tensor_parallel_size(trace)
            tokens[rows] = tokens.get(rows, 0.0) + share
    return JobWork(
        flops=(1 + BACKWARD) * sum(forward.values()),
        dtype=max(forward, key=lambda dtype: forward[dtype], default=""),
        tokens=round(tokens[max(tokens)]) if tokens else 0,
    )


def _rank_work(trace: RankTrace, log: LaunchLog) -> _RankWork:
    calls = [parse_signature(text.removeprefix(REPLAYED)) for text in log.signatures]
    flops = [_flops(call) for call in calls]
    found, phases = _RankWork(), set()
    for label, entries in _launches(trace, log):
        phases.add(label)
        for s, times in zip(*np.unique(entries, return_counts=True), strict=True):
            call = calls[s]
            if label == FORWARD and flops[s]:
                dtype = _DTYPES.get(operand_dtype(call), operand_dtype(call))
                found.forward[dtype] += flops[s] * int(times)
            if call.base == _EMBEDDING:
                rows = call.arguments.get("num_weights", (0,))[0]
                found.tokens[rows] += call.inputs[1].elements * int(times)
    if not {FORWARD, BACKWARDS} <= phases:
        # Without its backward passes a program is not known to have told its forward ones.
        found.forward.clear()
    return found


def _launches(trace: RankTrace, log: LaunchLog) -> Iterator[tuple[str, np.ndarray]]:
    """The label of each node that is work of a stream, and the signatures that it launched."""
    for i in np.flatnonzero(log.path_N == NodePath.WORK).tolist():
        part = slice(int(log.first_N[i]), int(log.stop_N[i]))
        own = (log.lane_E[part] == log.lane_N[i]) & (log.signature_E[part] != HOST_ONLY)
        label = trace.labels[int(trace.label_N[trace.n_prologue + int(log.node_N[i])])]
        yield label, log.signature_E[part][own]


def _flops(call: KernelCall) -> float:
    kind = kind_of(call)
    if kind in ("gemm", "convolution"):
        return float(sum(product.flops for product in products_of(call)))
    return attention_flops(call) if kind == "attention" else 0.0


def tensor_parallel_size(trace: RankTrace) -> int:
    """Ranks of its tensor-parallel group, told by the group's name; 1 where none is called so."""
    sizes = [1]
    for group in trace.groups:
        words = set(re.findall(r"[a-z]+", group.name.lower()))
        if words & _TENSOR and not words & _OTHER_AXES:
            sizes.append(len(group.ranks))
    return max(sizes)
