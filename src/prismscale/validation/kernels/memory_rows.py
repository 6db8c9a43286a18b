"""Public measurements of memory-bound kernels, as calls of the null device.

``cudnn_frontend``: norms in 16 bits, by torch and by cuDNN; constants are fitted on the families
that are not held out. ``liger``: eager norms, losses, embeddings and activations, each as the
operators that ATen launches for it; nothing is fitted on it. ``tracelens``: pointwise operators
inside running models; nothing is fitted on it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_signature import parse_signature
from prismscale.errors import UsageError
from prismscale.validation.kernels.held_out import HeldOut
from prismscale.validation.kernels.measured_calls import MeasuredCalls, call, tensor
from prismscale.validation.kernels.public_tables import table_rows

GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA GB200": "gb200",
}
Sizes = tuple[int, ...]
_TYPES = {
    "c10::BFloat16": "BFloat16",
    "c10::Half": "Half",
    "float": "Float",
    "double": "Double",
    "long int": "Long",
    "int": "Int",
    "bool": "Bool",
    "unsigned char": "Byte",
}
_IN_PLACE = ("pointwise", "broadcast", "fill")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow(MeasuredCalls):
    """One measurement, and whether constants may be fitted on it."""

    held_out: bool
    is_cold: bool = False
    """Whether the L2 cache was emptied before each run."""


def load_memory_rows(truth: Path) -> list[MemoryRow]:
    """Load all rows below ``truth``.

    Raises:
        UsageError: the folder has none.
    """
    held = HeldOut.load()
    rows = [*_norms(truth, held), *_liger(truth), *_tracelens(truth)]
    if not rows:
        raise UsageError(
            f"no measurements of norms or operators below '{truth}': expected "
            "cudnn_frontend/norms__*.csv, liger/all_benchmark_data.csv or "
            "tracelens/op_kernel_times_*.csv.gz"
        )
    return rows


def _norms(truth: Path, held: HeldOut) -> Iterator[MemoryRow]:
    for path in sorted((truth / "cudnn_frontend").glob("norms__*.csv")):
        for row in table_rows(path):
            backend, gpu = row.get("backend"), GPUS.get(row.get("gpu_name") or "")
            if row.get("success") != "True" or backend not in ("pytorch", "cudnn") or gpu is None:
                continue
            calls = _norm_calls(int(row["N"]), int(row["C"]), row["norm_type"], backend)
            library = "torch" if backend == "pytorch" else "cuDNN"
            for which, signature in calls.items():
                time_ms = float(row["fwd_time_ms" if which == "forward" else "bwd_time_ms"])
                if np.isfinite(time_ms):
                    yield MemoryRow(
                        gpu=gpu,
                        group=f"norm {which}, {library}",
                        signatures=(signature,),
                        time_ns=1e6 * time_ms,
                        held_out=held.holds("cudnn_norms", row["norm_name"]),
                    )


def _norm_calls(rows: int, width: int, kind: str, backend: str) -> Mapping[str, str]:
    x, weight, statistic = (
        tensor("BFloat16", rows, width),
        tensor("BFloat16", width),
        tensor("Float", rows, 1),
    )
    name = "native_layer_norm" if kind == "layer_norm" else "_fused_rms_norm"
    names = {"forward": name, "backward": f"{name}_backward"}
    if backend == "cudnn":
        names = {
            "forward": "transformer_engine::norm.fused_norm",
            "backward": "transformer_engine::norm_bwd.fused_norm_backward",
        }
    return {
        "forward": call(names["forward"], [x, weight], [x, statistic]),
        "backward": call(names["backward"], [x, x, statistic, weight], [x, weight]),
    }


def _liger(truth: Path) -> Iterator[MemoryRow]:
    path = truth / "liger" / "all_benchmark_data.csv"
    for row in table_rows(path) if path.exists() else ():
        gpu, eager = GPUS.get(row["gpu_name"]), ("huggingface", "torch")
        if gpu is None or row["kernel_provider"] not in eager or row["metric_name"] != "speed":
            continue
        config = json.loads(row["extra_benchmark_config_str"])
        calls = _eager(row["kernel_name"], int(float(row["x_value"])), config)
        signatures = calls.get(row["kernel_operation_mode"])
        if signatures:
            yield MemoryRow(
                gpu=gpu,
                group=f"{row['kernel_name']} {row['kernel_operation_mode']}, eager",
                signatures=tuple(signatures),
                time_ns=1e6 * float(row["y_value_50"]),
                held_out=True,
                is_cold=True,
            )


def _eager(kernel: str, x: int, config: Mapping[str, object]) -> Mapping[str, list[str]]:
    """Return the operators of one kernel of Liger's benchmarks; ``x`` is the extent it varies."""
    if kernel == "layer_norm":
        t, w, s = tensor("Float", 4096, x), tensor("Float", x), tensor("Float", 4096, 1)
        back = call("native_layer_norm_backward", [t, t, s, s, w, w], [t, w, w])
        return {"forward": [call("native_layer_norm", [t, w, w], [t, s, s])], "backward": [back]}
    if kernel == "cross_entropy":
        t, labels, one = tensor("Float", 16_384, x), tensor("Long", 16_384), tensor("Float")
        loss = call("nll_loss_forward", [t, labels], [one, one])
        return {"forward": [call("_log_softmax", [t], [t]), loss]}
    if kernel == "relu_squared":
        t = tensor("BFloat16", 4096, x)
        return {"forward": [call("relu", [t], [t]), call("pow.Tensor_Scalar", [t], [t])]}
    if kernel == "embedding":
        tokens, width = int(str(config["B"])) * int(str(config["T"])), int(str(config["D"]))
        found = [tensor("Float", x, width), tensor("Long", tokens)]
        return {"forward": [call("embedding", found, [tensor("Float", tokens, width)])]}
    if kernel == "rms_norm":
        return {"forward": _rms_norm(2048, x)}
    return {}


def _rms_norm(rows: int, width: int) -> list[str]:
    """Return RMSNorm as models of transformers write it: in 32 bits, operator by operator."""
    t, f, s = (
        tensor("BFloat16", rows, width),
        tensor("Float", rows, width),
        tensor("Float", rows, 1),
    )
    return [
        call("_to_copy", [t], [f]),
        call("pow.Tensor_Scalar", [f], [f]),
        call("mean.dim", [f], [s]),
        call("add.Tensor", [s], [s]),
        call("rsqrt", [s], [s]),
        call("mul.Tensor", [f, s], [f]),
        call("_to_copy", [f], [t]),
        call("mul.Tensor", [tensor("BFloat16", width), t], [t]),
    ]


def _tracelens(truth: Path) -> Iterator[MemoryRow]:
    for path in sorted((truth / "tracelens").glob("op_kernel_times_*.csv.gz")):
        for row in table_rows(path):
            name = row["name"].removeprefix("aten::")
            signature = _operator(name, row) if row["gpu"] == "h100" and "->" not in name else ""
            if signature:
                kind = kind_of(parse_signature(signature))
                if kind in _IN_PLACE:
                    yield MemoryRow(
                        gpu="h100-sxm",
                        group=f"{kind} in a running model",
                        signatures=(signature,),
                        time_ns=1e3 * float(row["Kernel Time_us_mean"]),
                        held_out=True,
                    )


def _operator(name: str, row: Mapping[str, str]) -> str:
    """Return the signature of an operator whose result has its operands' shape; else empty."""
    columns = ("Input Dims", "Input type", "Input Strides")
    sizes, types, strides = (ast.literal_eval(row[column]) for column in columns)
    found = [
        (s, _TYPES[t], d) for s, t, d in zip(sizes, types, strides, strict=True) if t in _TYPES
    ]
    if not found or any(0 in s for s, _, _ in found):
        return ""
    try:
        shape = np.broadcast_shapes(*(s for s, _, _ in found))
    except ValueError:
        return ""
    # A number that is an operand beside a tensor is in host memory.
    reads = [
        tensor(t, *s, strides=() if _is_contiguous(s, d) else d) + ("!cpu" if not s and i else "")
        for i, (s, t, d) in enumerate(found)
    ]
    dtype = "Bool" if name in _COMPARISONS else found[0][1]
    return call(name, reads, [tensor(dtype, *shape, strides=_kept_layout(shape, found))])


def _kept_layout(shape: Sizes, operands: Sequence[tuple[Sizes, str, Sizes]]) -> Sizes:
    """Return the strides of a result; empty if it is contiguous.

    ATen keeps a layout without gaps if all operands of the result's shape have it."""
    layouts = {tuple(strides) for sizes, _, strides in operands if tuple(sizes) == tuple(shape)}
    if len(layouts) != 1 or not shape:
        return ()
    (strides,) = layouts
    outer_first = sorted(zip(strides, shape, strict=True), reverse=True)
    by_stride, by_size = zip(*outer_first, strict=True)
    is_dense = _is_contiguous(by_size, by_stride)
    return strides if is_dense and not _is_contiguous(shape, strides) else ()


def _is_contiguous(sizes: Sizes, strides: Sizes) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
