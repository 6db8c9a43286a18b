"""Public measurements of fused attention, with the further work of their measuring programs.

``aiconfigurator``: bursts of the forward pass in servers for inference. Their programs write keys
and values into a cache (``kv_passes``), may read them through a table of pages (``slowdown``), and
share the keys of a block among idle multiprocessors. ``cudnn_frontend``: forward and backward pass
of training, by cuDNN and FlashAttention-2. ``simumax``: training on a B200, by wall time.

Kernels of TensorRT-LLM, Triton and FlashAttention-4 are in no table here, because the null device
answers no calls of these libraries. Attention windows are not priced, and are in no table either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.attention_blocks import CAUSAL, AttentionShapes, attention_times_ns
from prismscale.cost.kernel_attention import attention_roofline
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import item_bytes
from prismscale.errors import UsageError
from prismscale.validation.kernels.held_out import HeldOut
from prismscale.validation.kernels.measuring_programs import AttentionProgram, Harnesses
from prismscale.validation.kernels.public_tables import (
    SIMUMAX_PEAK,
    simumax_operators,
    simumax_shares,
    table_rows,
)

GPUS = {
    "a100": "a100-80g",
    "h100": "h100-sxm",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA GB200": "gb200",
}
IMPLEMENTATIONS = {
    "flash_attention": "flash",
    "vllm_flash_attn": "flash",
    "fa3": "flash_attn_3",
    "vllm_flash_attn_fa3": "flash_attn_3",
    "vllm_vit_flash_attn_fa3": "flash_attn_3",
    "cudnn": "cudnn",
}
"""Operators of the null device, by the names that the rows give to kernels."""
DTYPES = {"bfloat16": "BFloat16", "fp8": "Float8_e4m3fn", "mxfp8": "Float8_e4m3fn"}
_GRADIENTS = 2
"""Factor of the backward pass's bytes over the forward pass's, because it moves gradients, too."""
_SIMUMAX_READ_OFF = 32_768
"""Length from which on SimuMax's rows were used to find ``POWER_RESERVE``."""

BACKWARD = "backward"
DETERMINISTIC = "deterministic-backward"
Key = tuple[str, str, str, str, str]
"""GPU, operator, direction, element type, measuring program."""
Shape = tuple[float, float, float, float, float, float, float]
"""Batch, length, heads, key heads, head size, value size, share of scores that the mask leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """Rows of one :data:`Key`."""

    gpu: str
    operator: str
    direction: str
    """``forward``, or one of :data:`BACKWARD` and :data:`DETERMINISTIC`."""
    dtype: str
    """``bfloat16``, ``fp8``, ``mxfp8``."""
    program: str
    """Measuring program, such as ``vllm_flash_attn_fa3``."""
    shapes: NDArray[np.float64]
    """Each column is the :data:`Shape` of a row."""
    time_ns: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    measuring: AttentionProgram = field(default_factory=AttentionProgram)
    splits_keys: bool = False
    sustained: bool = False

    @property
    def name(self) -> str:
        """Name such as ``h100-sxm flash_attn_3 forward bfloat16``."""
        return f"{self.gpu} {self.operator} {self.direction} {self.dtype}"

    @property
    def backward(self) -> bool:
        """Whether the rows are of a backward pass."""
        return self.direction != "forward"

    def predicted_ns(self, profile: KernelProfile) -> NDArray[np.float64]:
        """Return the times that the measuring program would have read on ``profile``."""
        dtype = DTYPES[self.dtype]
        gpu = profile if self.sustained else profile.burst()
        batch, length, heads, kv_heads, size, value_size, share = self.shapes
        item = item_bytes(dtype)
        of_keys = item * batch * length * kv_heads * (size + value_size)
        n_bytes = of_keys + item * batch * length * heads * (size + value_size)
        shapes = AttentionShapes(
            batch * heads,
            length,
            length,
            size,
            value_size,
            share,
            n_bytes * (_GRADIENTS if self.backward else 1),
        )
        alone = attention_times_ns(
            gpu,
            attention_roofline(gpu, self.operator, dtype, backward=self.backward),
            gpu.gemm[dtype],
            shapes,
            backward=self.backward,
            in_fixed_order=self.direction == DETERMINISTIC,
            splits_keys=self.splits_keys,
        )
        cached = 1e9 * self.measuring.kv_passes * of_keys / profile.memory_bandwidth_bytes_per_s
        return self.measuring.slowdown * alone + self.measuring.overhead_ns + cached


def load_attention(truth: Path) -> list[AttentionRows]:
    """Load all tables below ``truth``.

    Raises:
        UsageError: the folder has none.
    """
    held = HeldOut.load()
    found: dict[Key, list[tuple[Shape, float, bool]]] = {}
    for key, shape, time_ns, is_held in (
        *_bursts(truth / "aiconfigurator", held),
        *_cudnn(truth, held),
    ):
        found.setdefault(key, []).append((shape, time_ns, is_held))
    if not found:
        raise UsageError(
            f"no tables of attention below '{truth}': expected aiconfigurator/"
            "h100_sxm__context_attention_perf__vllm_0.24.0.csv.gz and others"
        )
    programs = Harnesses.load().attention
    tables = [_table(key, rows, programs) for key, rows in sorted(found.items())]
    simumax = simumax_operators(truth)
    return [*tables, *_sustained(simumax, held)] if simumax.exists() else tables


def _table(
    key: Key,
    rows: Iterable[tuple[Shape, float, bool]],
    programs: Mapping[str, AttentionProgram],
    *,
    sustained: bool = False,
) -> AttentionRows:
    gpu, operator, direction, dtype, program = key
    shapes, times, held = zip(*rows, strict=True)
    return AttentionRows(
        gpu=gpu,
        operator=operator,
        direction=direction,
        dtype=dtype,
        program=program,
        shapes=np.array(shapes, float).T,
        time_ns=np.array(times, float),
        held_out=np.array(held, bool),
        measuring=programs.get(f"{gpu} {dtype} {program}", AttentionProgram()),
        splits_keys=operator != "cudnn" and direction == "forward" and gpu != "a100-pcie",
        sustained=sustained,
    )


_Keyed = tuple[Key, Shape, float, bool]


def _bursts(folder: Path, held: HeldOut) -> Iterator[_Keyed]:
    for path in sorted(folder.glob("*_attention_perf__*.csv.gz")):
        gpu = GPUS.get(path.name.split("_")[0])
        for row in table_rows(path):
            operator, dtype = IMPLEMENTATIONS.get(row["kernel_source"]), row["attn_dtype"]
            plain = row.get("window_size", "0") == "0" and row.get("kv_cache_dtype", dtype) == dtype
            if gpu is None or operator is None or not plain:
                continue
            heads, size = row["num_heads"], row["head_dim"]
            of_keys = row.get("num_key_value_heads", heads)
            share = CAUSAL if "num_key_value_heads" in row else 1.0
            family = f"heads={heads},kv={of_keys},size={size}"
            texts = (row["batch_size"], row["isl"], heads, of_keys, size, size)
            key = (gpu, operator, "forward", dtype, row["kernel_source"])
            yield (
                key,
                _shape((*map(float, texts), share)),
                1e6 * float(row["latency_ms"]),
                held.holds("aiconfigurator_attention", family),
            )


def _cudnn(truth: Path, held: HeldOut) -> Iterator[_Keyed]:
    folder = truth / "cudnn_frontend"
    for path in sorted(folder.glob("attention_training__*.csv")):
        for row in table_rows(path):
            numbers = ("batch", "seqlen", "q_heads", "kv_heads", "head_dim", "head_dim")
            times = {row["pass"]: row["time_ms"]}
            family = f"llama3.1,{row['mask']},{row['seqlen']}"
            about = (row["gpu"], row["backend"], row["dtype"], row["mask"])
            yield from _passes(about, [row[n] for n in numbers], times, family, held, row)
    for path in sorted(folder.glob("sdpa_benchmark_training__*.csv")):
        for row in table_rows(path):
            if row["success"] != "True" or row["sliding_window_size"]:
                continue
            wide = ("batch_size", "q_seqlen", "num_q_heads", "num_kv_heads", "head_dim_qk")
            both = {"fwd": row.get("fwd_time_ms", ""), "bwd": row.get("bwd_time_ms", "")}
            times = {row["profile_pass"]: row["time_ms"]} if "time_ms" in row else both
            family = f"{row['model_name']},{row['attn_mask']},{row['q_seqlen']}"
            about = (row["gpu_name"], row["backend"], row["data_type"], row["attn_mask"])
            numbers_of = [row[n] for n in (*wide, "head_dim_vo")]
            yield from _passes(about, numbers_of, times, family, held, row)


def _passes(
    about: tuple[str, str, str, str],
    numbers: list[str],
    times: Mapping[str, str],
    family: str,
    held: HeldOut,
    row: Mapping[str, str],
) -> Iterator[_Keyed]:
    gpu, backend, dtype, mask = about
    operator = IMPLEMENTATIONS.get(backend)
    if operator is None or gpu not in GPUS:
        return
    shape = _shape((*map(float, numbers), CAUSAL if mask == "top_left" else 1.0))
    backward = DETERMINISTIC if row["deterministic_bwd"] == "True" else BACKWARD
    for which, time in times.items():
        if time and np.isfinite(float(time)):
            direction = backward if which == "bwd" else "forward"
            key = (GPUS[gpu], operator, direction, dtype, f"cudnn_frontend {backend}")
            yield key, shape, 1e6 * float(time), held.holds("cudnn_attention", family)


def _sustained(path: Path, held: HeldOut) -> Iterator[AttentionRows]:
    for kind, direction, factor in (("sdp_fwd", "forward", 2.0), ("sdp_bwd", BACKWARD, 5.0)):
        rows = [_trained(of, share, factor, held) for of, share in simumax_shares(path, kind)]
        for program, is_read_off in (("simumax", False), ("simumax, read off", True)):
            chosen = [row for row in rows if (row[0][1] >= _SIMUMAX_READ_OFF) == is_read_off]
            if chosen:
                key = ("b200", "cudnn", direction, "bfloat16", program)
                yield _table(key, chosen, {}, sustained=True)


def _trained(
    stated: Mapping[str, str], share: float, factor: float, held: HeldOut
) -> tuple[Shape, float, bool]:
    """Return a row of SimuMax, whose efficiency tests count operations as if there was no mask."""
    names = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    shape = _shape((*(float(stated[name]) for name in names), CAUSAL))
    batch, length, heads, _, size, value_size, _ = shape
    flops = factor * batch * length**2 * heads * (size + value_size)
    sizes = f"{stated['qk_head_dim']}/{stated['v_head_dim']}"
    family = f"heads={stated['head_num']},kv={stated['kv_head_num']},size={sizes}"
    is_held = held.holds("simumax_attention", family)
    return shape, 1e9 * flops / (share * SIMUMAX_PEAK), is_held


def _shape(numbers: Iterable[float]) -> Shape:
    batch, length, heads, of_keys, size, value_size, share = numbers
    return batch, length, heads, of_keys, size, value_size, share
