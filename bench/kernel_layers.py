"""Kernels of one Megatron GPT layer and head, for arithmetic on published iteration times.

vTrain's single-node rows (``vtrain_a100/ground_truth_single.csv``) are Megatron-LM in fp16 on A100
SXM 80 GB: unfused attention with Megatron's fused softmax, no recomputation. Rows without tensor
parallelism need nothing but kernels and the pipeline's fill, up to the gradients' all-reduce, which
overlaps or not as the program had it and is left out here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_truth import FIELD, Shape
from prismscale.cost.kernel import KernelModel

VOCABULARY = 50_304


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One published row without tensor parallelism."""

    batch: int
    hidden: int
    heads: int
    layers: int
    length: int
    microbatches: int
    stages: int
    time_ns: float


def load_iterations(truth: Path) -> Iterator[Iteration]:
    """Rows with a tensor-parallel size of 1."""
    path = truth / "vtrain_a100" / "ground_truth_single.csv"
    with path.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            if row["tensor parallelism"] != "1":
                continue
            batch, data_parallel = int(row["micro batch"]), int(row["data parallelism"])
            yield Iteration(
                batch=batch,
                hidden=int(row["hidden size"]),
                heads=int(row["attention heads"]),
                layers=int(row["# layers"]),
                length=int(row["sequence length"]),
                microbatches=int(row["global batch"]) // batch // data_parallel,
                stages=int(row["pipeline parallelism"]),
                time_ns=1e6 * float(row["iteration time (ms)"]),
            )


def predicted_ns(model: KernelModel, row: Iteration) -> float:
    """Kernels of the slowest stage, filled and drained as 1F1B does."""
    rows = row.batch * row.length
    layer = _total_ns(model, _layer(row.batch, row.length, row.hidden, row.heads))
    head = _total_ns(model, _head(rows, row.hidden))
    stage = layer * row.layers / row.stages
    return (row.microbatches + row.stages - 1) * stage + row.microbatches * head


def _total_ns(model: KernelModel, signatures: Iterator[str]) -> float:
    return sum(model.cost(signature).device_ns for signature in signatures)


def _call(name: str, inputs: list[Shape], outputs: list[Shape], dtype: str = "Half") -> str:
    def text(shapes: list[Shape]) -> str:
        return ";".join(f"{dtype}[{','.join(map(str, shape))}]" for shape in shapes)

    return FIELD.join((f"aten::{name}", text(inputs), text(outputs), ""))


def _product(m: int, n: int, k: int) -> Iterator[str]:
    """Forward, gradient of the input, gradient of the weight."""
    yield _call("addmm", [(n,), (m, k), (k, n)], [(m, n)])
    yield _call("mm", [(m, n), (n, k)], [(m, k)])
    yield _call("mm", [(k, m), (m, n)], [(k, n)])


def _layer(batch: int, length: int, hidden: int, heads: int) -> Iterator[str]:
    rows, width = batch * length, hidden // heads
    for n, k in (
        (3 * hidden, hidden),
        (hidden, hidden),
        (4 * hidden, hidden),
        (hidden, 4 * hidden),
    ):
        yield from _product(rows, n, k)
    q, scores = (batch * heads, length, width), (batch * heads, length, length)
    keys = (batch * heads, width, length)
    for _ in range(3):  # forward and the two gradients of each
        yield _call("bmm", [q, keys], [scores])
        yield _call("bmm", [scores, q], [q])
    yield _call("_softmax", [scores], [scores])
    yield _call("_softmax_backward_data", [scores, scores], [scores])
    for _ in range(2):  # dropout of the scores
        yield _call("mul.Tensor", [scores, scores], [scores])
    wide, narrow = (rows, 4 * hidden), (rows, hidden)
    yield _call("gelu", [wide], [wide])
    yield _call("gelu_backward", [wide, wide], [wide])
    for _ in range(2):
        yield _call("native_layer_norm", [narrow, (hidden,), (hidden,)], [narrow])
        yield _call("native_layer_norm_backward", [narrow, narrow], [narrow, (hidden,)])
        yield _call("add.Tensor", [narrow, narrow], [narrow])
        yield _call("mul.Tensor", [narrow, narrow], [narrow])
        yield _call("mul.Tensor", [narrow, narrow], [narrow])


def _head(rows: int, hidden: int) -> Iterator[str]:
    yield from _product(rows, VOCABULARY, hidden)
    logits = (rows, VOCABULARY)
    for _ in range(4):  # the loss over float32 logits: largest, exponentials, sum, gradient
        yield _call("mul.Tensor", [logits], [logits], "Float")
