"""Work of one step of a job: floating-point operations of its model, and tokens it trains on.

Both are read off the launches of a null run. The model's operations are three times those of its
forward passes: a backward pass has two products for each product of the forward pass, and
recomputation by checkpointing does not count. This is the definition of model FLOPs utilisation by
Chowdhery et al. (PaLM, arXiv 2204.02311, appendix B). Programs that print it differ in whether they
count the half of attention that a causal mask leaves out; both counts are here.

Tokens are the indices that the gradient of the largest embedding sums over. Layers that predict
further tokens (MTP) look up the same tokens again. In a pipeline they do so on a later stage, and
only the first stage with a lookup counts. Without a pipeline, the backward pass reaches such a
lookup after the operations of few layers: lookups with less than half of the largest number of
backward operations before them are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.stages import classes_by_stage
from prismscale.cost.kernel_attention import attention_flops
from prismscale.cost.kernel_gemm import operand_dtype, products_of
from prismscale.cost.kernel_kinds import PRODUCT_KINDS, kind_of
from prismscale.cost.kernel_signature import TORCH_DTYPES, KernelCall, parse_signature
from prismscale.cost.launch_log import REPLAYED, STATED, LaunchLog, NodePath, load_launch_log
from prismscale.durations.recosting import launches_path
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace

BACKWARD = 2
"""Ratio of the operations of a model's backward pass to those of its forward pass."""
FORWARD, BACKWARDS = "forward", "backward"
"""Labels of computations in a trace."""
_EMBEDDING = "embedding_dense_backward"
_TENSOR = {"tp", "tensor"}
_OTHER_AXES = {"dp", "data", "cp", "context", "ep", "expert", "pp", "pipeline", "pipe", "fsdp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWork:
    """The work of one step over all ranks."""

    flops: float = 0.0
    """Operations of the model, without those that attention masks leave out; 0 where forward and
    backward passes cannot be told apart."""
    unmasked_flops: float = 0.0
    """The same as if no mask left out any. This is the count of PaLM and torchtitan."""
    executed_flops: float = 0.0
    """Operations of all products and attention that run, recomputation included."""
    dtype: str = ""
    """Torch's name of the element type of most executed operations."""
    tokens: int = 0
    """Tokens of the whole job; 0 where no embedding was found."""


class _Lookup(NamedTuple):
    """One lookup of tokens in an embedding, as seen from the kernel of the embedding's gradient."""

    rows: int
    """Rows of the embedding."""
    tokens: int
    backward: float
    """Operations of the backward pass since the gradient of the previous lookup."""


class _Flops(NamedTuple):
    """Floating-point operations of one call."""

    executed: float
    unmasked: float


@dataclass(kw_only=True)
class _RankWork:
    model: float = 0.0
    unmasked: float = 0.0
    executed: dict[str, float] = field(default_factory=dict)
    """Executed operations by element type."""
    lookups: list[_Lookup] = field(default_factory=list)

    def tokens(self, *, is_pipelined: bool) -> tuple[int, int]:
        """Return the rows of the largest embedding, and the tokens that were looked up in it."""
        rows = max(lookup.rows for lookup in self.lookups)
        found = [lookup for lookup in self.lookups if lookup.rows == rows]
        # Backward passes of a pipeline's chunks alternate, so their operations tell nothing there.
        least = 0.0 if is_pipelined else max(lookup.backward for lookup in found) / 2
        return rows, sum(lookup.tokens for lookup in found if lookup.backward >= least)


def job_work(graph: JobGraph, captures: Path) -> JobWork:
    """Compute the work of one step of a null run.

    Args:
        graph: the run's job graph.
        captures: folder of the traces that the graph was assembled from.

    Raises:
        UsageError: a launch log is missing. FormatError: it is damaged.
    """
    model = unmasked = 0.0
    executed: dict[str, float] = {}
    tokens: dict[int, float] = {}
    for stage, classes in classes_by_stage(graph).items():
        of_stage: dict[int, float] = {}
        for rank_class in classes:
            trace = rank_class.trace
            rank = (trace.facts.longest_of or (trace.rank,))[0]
            own = _rank_work(trace, load_launch_log(launches_path(captures, rank)))
            model += own.model * rank_class.size
            unmasked += own.unmasked * rank_class.size
            for dtype, flops in own.executed.items():
                executed[dtype] = executed.get(dtype, 0.0) + flops * rank_class.size
            if own.lookups:
                rows, found = own.tokens(is_pipelined=stage is not None)
                # Every rank of a tensor-parallel group reads the same tokens.
                share = found * rank_class.size / tensor_parallel_size(trace)
                of_stage[rows] = of_stage.get(rows, 0.0) + share
        tokens = tokens or of_stage
    return JobWork(
        flops=(1 + BACKWARD) * model,
        unmasked_flops=(1 + BACKWARD) * unmasked,
        executed_flops=sum(executed.values()),
        dtype=max(executed, key=lambda dtype: executed[dtype], default=""),
        tokens=round(tokens[max(tokens)]) if tokens else 0,
    )


def _rank_work(trace: RankTrace, log: LaunchLog) -> _RankWork:
    calls = [parse_signature(text.removeprefix(REPLAYED)) for text in log.signatures]
    flops = [_flops(call) for call in calls]
    label_E = _labels_of_entries(trace, log)
    found, phases = _RankWork(), set()
    for label, signature, times in _launches(trace, log, label_E):
        phases.add(label)
        call, own = calls[signature], flops[signature]
        if own.executed:
            dtype = TORCH_DTYPES.get(operand_dtype(call), operand_dtype(call))
            found.executed[dtype] = found.executed.get(dtype, 0.0) + own.executed * times
        if label == FORWARD:
            found.model += own.executed * times
            found.unmasked += own.unmasked * times
    if not {FORWARD, BACKWARDS} <= phases:
        # If no backward pass is labelled, the forward labels cannot be trusted either.
        found.model = found.unmasked = 0.0
    found.lookups = list(_lookups(trace, log, label_E, calls, flops))
    return found


def _lookups(
    trace: RankTrace,
    log: LaunchLog,
    label_E: NDArray[np.int64],
    calls: Sequence[KernelCall],
    flops: Sequence[_Flops],
) -> Iterator[_Lookup]:
    """Yield the embedding lookups, in the order of their gradient kernels."""
    flops_E = np.zeros(log.n_entries)
    (backward,) = np.nonzero(label_E == _index(trace.labels, BACKWARDS))
    if len(backward):
        flops_E[backward] = np.array([own.executed for own in flops])[log.signature_E[backward]]
    embeddings = [number for number, call in enumerate(calls) if call.base == _EMBEDDING]
    (entries,) = np.nonzero((label_E >= 0) & np.isin(log.signature_E, embeddings))
    since_before = np.diff(np.cumsum(flops_E)[entries], prepend=0.0)
    for signature, backward in zip(log.signature_E[entries], since_before.tolist(), strict=True):
        call = calls[signature]
        rows = call.arguments.get("num_weights", (0,))[0]
        yield _Lookup(rows, call.inputs[1].elements, backward)


def _index(labels: Sequence[str], label: str) -> int:
    """Return the index of ``label``, or -2, which no entry has, where it is missing."""
    return labels.index(label) if label in labels else -2


def _launches(
    trace: RankTrace, log: LaunchLog, label_E: NDArray[np.int64]
) -> Iterator[tuple[str, int, int]]:
    """Yield label, signature index and count of the launches that are work of a stream."""
    (entries,) = np.nonzero(label_E >= 0)
    pairs = np.stack([label_E[entries], log.signature_E[entries]])
    found, times = np.unique(pairs, axis=1, return_counts=True)
    for (label, signature), n in zip(found.T.tolist(), times.tolist(), strict=True):
        yield trace.labels[label], signature, n


def _labels_of_entries(trace: RankTrace, log: LaunchLog) -> NDArray[np.int64]:
    """Return each entry's label index, from the node that holds its work; -1 if there is none."""
    label_E = np.full(log.n_entries, -1, dtype=np.int64)
    is_work_N = log.path_N == NodePath.WORK
    for lane in np.unique(log.lane_N[is_work_N]).tolist():
        (entries,) = np.nonzero((log.lane_E == lane) & (log.signature_E != STATED))
        (nodes,) = np.nonzero(is_work_N & (log.lane_N == lane))
        # Nodes of one lane hold consecutive ranges of entries.
        nodes = nodes[np.argsort(log.first_N[nodes], kind="stable")]
        place = np.searchsorted(log.first_N[nodes], entries, side="right") - 1
        inside = (place >= 0) & (entries < log.stop_N[nodes][place])
        of_trace = trace.n_prologue + log.node_N[nodes[place[inside]]]
        label_E[entries[inside]] = trace.label_N[of_trace]
    return label_E


def _flops(call: KernelCall) -> _Flops:
    kind = kind_of(call)
    if kind in PRODUCT_KINDS:
        flops = float(sum(product.flops for product in products_of(call)))
        return _Flops(flops, flops)
    if kind in ("attention", "attention_backward"):
        return _Flops(*attention_flops(call, backward=kind == "attention_backward"))
    return _Flops(0.0, 0.0)


def tensor_parallel_size(trace: RankTrace) -> int:
    """Return the size of the group named as tensor-parallel; 1 where no group has such a name."""
    sizes = [1]
    for group in trace.groups:
        words = set(re.findall(r"[a-z]+", group.name.lower()))
        if words & _TENSOR and not words & _OTHER_AXES:
            sizes.append(len(group.ranks))
    return max(sizes)
