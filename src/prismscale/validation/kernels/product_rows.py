"""Public measurements of matrix products, with the further work of their measuring programs.

``aiconfigurator``: bursts of one linear layer, measured separately for three frameworks; the time
of the kernels without launches. 8-bit rows contain the quantisation of the activations, which each
framework does in its own way. A few frameworks' rows are bound by the thread that issues them.
``harness.toml`` beside this module has the constants for this. They belong to the measuring
programs and are fitted with the products.

``simumax``: products of training steps on a B200, which ran for longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_gemm import factor_bytes
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_tiles import WIDE_RESULT, products_ns
from prismscale.errors import UsageError
from prismscale.validation.kernels.held_out import HeldOut
from prismscale.validation.kernels.measuring_programs import Harness, Harnesses
from prismscale.validation.kernels.public_tables import (
    AICONFIGURATOR_GPUS,
    SIMUMAX_PEAK,
    simumax_operators,
    simumax_shares,
    table_rows,
)

DTYPES = {
    "bfloat16": "BFloat16",
    "fp8": "Float8_e4m3fn",
    "fp8_block": "Float8_e4m3fn",
    "nvfp4": "Float4_e2m1fn_x2",
}
ROOFLINE_SHARE = 0.75
"""Share of peak and bandwidth that the rule of thumb assumes; chosen before any row was scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRows:
    """Rows of one GPU, kind and framework."""

    name: str
    """Name such as ``h100-sxm fp8 vllm``."""
    gpu: str
    kind: str
    """``bfloat16``, ``fp8`` (per tensor or per token), ``fp8_block``, ``nvfp4``."""
    framework: str
    extents: NDArray[np.float64]
    """Batch, M, N, K; one column per row of the table."""
    result_bytes: NDArray[np.float64]
    """Bytes of one element of each result."""
    time_ns: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    harness: Harness = field(default_factory=Harness)
    sustained: bool = False
    """Whether the products ran long enough for the power limit to slow them down."""
    layouts: NDArray[np.str_] | None = None
    """Role of each row in training: ``forward``, ``dgrad``, ``wgrad``, ``wgrad, fp32``."""

    def predicted_ns(self, profile: KernelProfile) -> NDArray[np.float64]:
        """Return the times that the measuring program would have read on ``profile``."""
        dtype = DTYPES[self.kind]
        gpu = profile if self.sustained else profile.burst()
        batch, m, n, k = self.extents
        size = factor_bytes(dtype)
        n_bytes = batch * (size * (m * k + k * n) + self.result_bytes * m * n)
        alone = products_ns(gpu, gpu.gemm[dtype], self.extents, n_bytes, size)
        alone *= np.where(self.result_bytes > max(size, 2), WIDE_RESULT, 1.0)
        bandwidth = profile.memory_bandwidth_bytes_per_s
        return self.harness.measured_ns(alone, self.extents, bandwidth)

    def roofline_ns(self, profile: KernelProfile) -> NDArray[np.float64]:
        """Return times by a rule of thumb.

        A product runs at :data:`ROOFLINE_SHARE` of the peak or of the bandwidth, whichever takes
        longer."""
        dtype = DTYPES[self.kind]
        batch, m, n, k = self.extents
        n_bytes = batch * (factor_bytes(dtype) * (m * k + k * n) + self.result_bytes * m * n)
        computing_s = 2 * self.extents.prod(0) / profile.gemm[dtype].peak_flops
        moving_s = n_bytes / profile.memory_bandwidth_bytes_per_s
        return 1e9 * np.maximum(computing_s, moving_s) / ROOFLINE_SHARE


def load_products(truth: Path) -> list[ProductRows]:
    """Load all tables below ``truth``.

    Raises:
        UsageError: the folder has none.
    """
    paths = sorted((truth / "aiconfigurator").glob("*__gemm_perf__*.csv.gz"))
    if not paths:
        raise UsageError(
            f"no tables of matrix products in '{truth / 'aiconfigurator'}': expected files named "
            "like h100_sxm__gemm_perf__vllm_0.24.0.csv.gz"
        )
    held, programs = HeldOut.load(), Harnesses.load().programs
    found = [rows for path in paths for rows in _burst(path, held, programs)]
    simumax = simumax_operators(truth)
    return [*found, _sustained(simumax, held)] if simumax.exists() else found


def _burst(path: Path, held: HeldOut, programs: Mapping[str, Harness]) -> Iterator[ProductRows]:
    gpu, _, framework = path.name.removesuffix(".csv.gz").split("__")
    gpu, framework = AICONFIGURATOR_GPUS[gpu.split("_")[0]], framework.split("_")[0]
    table = list(table_rows(path))
    for kind in DTYPES:
        rows = [row for row in table if row["gemm_dtype"] == kind]
        if not rows:
            continue
        extents = np.array([(1, row["m"], row["n"], row["k"]) for row in rows], float).T
        yield ProductRows(
            name=f"{gpu} {kind} {framework}",
            gpu=gpu,
            kind=kind,
            framework=framework,
            extents=extents,
            result_bytes=np.full(len(rows), 2.0),
            time_ns=1e6 * np.array([row["latency_ms"] for row in rows], float),
            held_out=np.array(
                [held.holds("aiconfigurator_gemm", f"n={r['n']},k={r['k']}") for r in rows]
            ),
            harness=programs.get(f"{gpu} {kind} {framework}", Harness()),
        )


def _sustained(path: Path, held: HeldOut) -> ProductRows:
    """Load SimuMax's rows: forward (TN), gradients of inputs (NN) and of weights (NT)."""
    stated, shares = zip(*simumax_shares(path, "matmul"), strict=True)
    extents = np.array([[s[e] for e in "bmnk"] for s in stated], float).T
    families = ["x".join(map(str, sorted(int(s[e]) for e in "mkn"))) for s in stated]
    return ProductRows(
        name="b200 bfloat16 simumax",
        gpu="b200",
        kind="bfloat16",
        framework="simumax",
        extents=extents,
        result_bytes=np.array([4.0 if s["out_dtype"] == "fp32" else 2.0 for s in stated]),
        time_ns=1e9 * 2 * extents.prod(0) / (np.array(shares) * SIMUMAX_PEAK),
        held_out=np.array([held.holds("simumax_products", family) for family in families]),
        sustained=True,
        layouts=np.array([_layout(s) for s in stated]),
    )


def _layout(stated: Mapping[str, str]) -> str:
    name = {"TN": "forward", "NN": "dgrad", "NT": "wgrad"}[stated["layout"]]
    return name + (", fp32" if stated["out_dtype"] == "fp32" else "")
