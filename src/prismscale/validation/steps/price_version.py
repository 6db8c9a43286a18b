"""The version of the prices by which a step was predicted: a hash of eight letters.

A run of a real program takes minutes to hours, so predicted steps are recorded. A price that
changes afterwards makes them stale without changing them. The letters are a hash of the models'
results, to four digits, for a few hundred calls and communications. They change when a constant
changes, but not when a comment does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.kernel_signature import FIELD
from prismscale.graph.node import CollectiveOp

LETTERS = 8
PRODUCTS = ((1, 4096, 4096), (128, 4096, 1024), (2048, 2048, 2048), (4096, 14336, 4096))
MORE_PRODUCTS = ((8192, 8192, 8192), (8192, 128256, 4096), (16384, 512, 7168), (300, 700, 65536))
DTYPES = ("BFloat16", "Half", "Float8_e4m3fn", "Float")
ELEMENTWISE = ("mul.Tensor", "native_layer_norm", "_softmax", "sum", "clone", "embedding", "sort")
COLLECTIVES = (
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.ALL_TO_ALL,
    CollectiveOp.BROADCAST,
)
GROUP_SIZES = (2, 8, 128)
MESSAGES = (1 << 10, 1 << 20, 1 << 26, 1 << 30)
"""Sizes in bytes."""


def price_version(cluster: Cluster, gpu: str) -> str:
    """Return the version of the prices of ``gpu``'s kernels and ``cluster``'s communication.

    Raises:
        UsageError: there is no such GPU.
    """
    model = load_kernel_model(gpu)
    costs = [model.cost(signature) for signature in call_signatures()]
    times = [float(ns) for cost in costs for ns in (cost.device_ns, cost.host_ns)]
    times += communication_ns(cluster).values()
    text = " ".join(f"{ns:.4g}" for ns in times)
    return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]


def communication_ns(cluster: Cluster) -> dict[str, float]:
    """Return the durations that the cluster's model gives for collectives, by their description."""
    model = collective_model(cluster)
    return {
        f"{op.name.lower()} of {size}, {n_bytes} bytes": float(
            model.duration_ns(op, n_bytes, np.arange(size, dtype=np.int64)[:, None])[0]
        )
        for op in COLLECTIVES
        for size in GROUP_SIZES
        for n_bytes in MESSAGES
    }


def call_signatures() -> Iterator[str]:
    """Yield the signatures of kernels: products, attention, and memory-bound operators."""
    yield from _products()
    yield from _attention()
    yield from _memory()


def _call(name: str, inputs: str, outputs: str, arguments: str = "") -> str:
    return FIELD.join((f"aten::{name}", inputs, outputs, arguments))


def _products() -> Iterator[str]:
    for m, n, k in (*PRODUCTS, *MORE_PRODUCTS):
        for dtype in DTYPES:
            yield _call("mm", f"{dtype}[{m},{k}];{dtype}[{k},{n}]", f"{dtype}[{m},{n}]")
    yield _call(
        "_grouped_mm", "BFloat16[8192,4096];BFloat16[8,4096,4096];Int[8]", "BFloat16[8192,4096]"
    )


def _attention() -> Iterator[str]:
    for family in ("flash", "efficient", "cudnn"):
        for length in (512, 8192):
            shape = f"BFloat16[1,32,{length},128]"
            name = f"_scaled_dot_product_{family}_attention"
            yield _call(name, ";".join([shape] * 3), shape, "is_causal=1")
            yield _call(f"{name}_backward", ";".join([shape] * 6), shape, "is_causal=1")


def _memory() -> Iterator[str]:
    for name in ELEMENTWISE:
        for rows in (16, 8192):
            yield _call(name, f"Float[{rows},8192]", f"Float[{rows},8192]")
