"""Public measurements of matrix products, with what their measuring programs ran besides.

``aiconfigurator``: bursts of one linear layer, three frameworks measured apart, time of the kernels
without launches. 8-bit rows hold the quantisation of the activations too, each framework its own
way; a few frameworks' rows are bound by the thread that issues them. ``harness.toml`` beside this
module has these constants, which are of the measuring program and are fitted with the products.

``simumax``: products of training steps on a B200 that ran for longer.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import item_bytes
from prismscale.cost.kernel_tiles import WIDE_RESULT, products_ns
from prismscale.errors import UsageError
from prismscale.typed_files import decode, parse
from prismscale.validation.kernels.held_out import HeldOut

GPUS = {"a100": "a100-80g", "h100": "h100-sxm", "b200": "b200"}
DTYPES = {"bfloat16": "BFloat16", "fp8": "Float8_e4m3fn", "fp8_block": "Float8_e4m3fn"}
_QUANTISED_BYTES = 3
"""Of each activation that is quantised: two are read, one is written."""
_SIMUMAX_PEAK = 2250e12
"""FLOP/s that its efficiencies are shares of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """What a measuring program ran beside the product."""

    overhead_ns: float = 0.0
    quantise_share: float = 0.0
    """Share of the memory bandwidth that quantising the activations reaches; 0: none quantised."""
    floor_ns: float = 0.0
    """No row is shorter: the thread that issues the kernels."""

    def measured_ns(
        self, product_ns: NDArray[np.float64], extents: NDArray[np.float64], bandwidth: float
    ) -> NDArray[np.float64]:
        """What the program would have read, where the product alone takes ``product_ns``."""
        time_ns = product_ns + self.overhead_ns
        if self.quantise_share:
            n_bytes = _QUANTISED_BYTES * extents[0] * extents[1] * extents[3]
            time_ns = time_ns + 1e9 * n_bytes / (self.quantise_share * bandwidth)
        return np.maximum(time_ns, self.floor_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRows:
    """One table."""

    name: str
    """Such as ``h100-sxm fp8 vllm``."""
    gpu: str
    kind: str
    """``bfloat16``, ``fp8`` (per tensor or per token), ``fp8_block``."""
    framework: str
    extents: NDArray[np.float64]
    """Batch, M, N, K; one column a row."""
    result_bytes: NDArray[np.float64]
    """Of one element of each result."""
    time_ns: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    harness: Harness = Harness()
    sustained: bool = False
    """Ran for long enough to feel the power limit."""
    layouts: NDArray[np.str_] | None = None
    """What each row is in training: ``forward``, ``dgrad``, ``wgrad``, ``wgrad, fp32``."""

    def predicted_ns(self, profile: KernelProfile) -> NDArray[np.float64]:
        """What the measuring program would have read on ``profile``."""
        dtype = DTYPES[self.kind]
        gpu = profile if self.sustained else profile.burst()
        batch, m, n, k = self.extents
        size = item_bytes(dtype)
        n_bytes = batch * (size * (m * k + k * n) + self.result_bytes * m * n)
        alone = products_ns(gpu, gpu.gemm[dtype], self.extents, n_bytes, size)
        alone *= np.where(self.result_bytes > max(size, 2), WIDE_RESULT, 1.0)
        bandwidth = profile.memory_bandwidth_bytes_per_s
        return self.harness.measured_ns(alone, self.extents, bandwidth)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProgram:
    """What a measuring program ran beside attention."""

    overhead_ns: float = 0.0
    kv_passes: float = 0.0
    """Times that keys and values crossed the memory bus more often than attention reads them."""
    slowdown: float = 1.0
    """Of the kernel, by reading keys through a table of pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harnesses:
    """``harness.toml``: the measuring programs by GPU, kind and framework."""

    programs: Mapping[str, Harness]
    attention: Mapping[str, AttentionProgram] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Harnesses:
        """The file of this package."""
        file = resources.files("prismscale.validation.kernels").joinpath("harness.toml")
        return decode(cls, parse(file.read_text(encoding="utf-8"), "harnesses"), "harnesses")


def load_products(truth: Path) -> list[ProductRows]:
    """All tables below ``truth``.

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
    simumax = truth / "simumax_b200" / "measured_operators.json"
    return [*found, _sustained(simumax, held)] if simumax.exists() else found


def _burst(path: Path, held: HeldOut, programs: Mapping[str, Harness]) -> Iterator[ProductRows]:
    gpu, _, framework = path.name.removesuffix(".csv.gz").split("__")
    gpu, framework = GPUS[gpu.split("_")[0]], framework.split("_")[0]
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    table = list(csv.DictReader(io.StringIO(text)))
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
    """Forward (TN), gradients of inputs (NN) and of weights (NT)."""
    operators = json.loads(path.read_text(encoding="utf-8"))["accelerator"]["op"]
    stated, shares = [], []
    for text, share in operators["matmul"]["accurate_efficient_factor"].items():
        stated.append(dict(re.findall(r"(\w+)=(\w+)", text)))
        shares.append(share)
    extents = np.array([[s[e] for e in "bmnk"] for s in stated], float).T
    families = ["x".join(map(str, sorted(int(s[e]) for e in "mkn"))) for s in stated]
    return ProductRows(
        name="b200 bfloat16 simumax",
        gpu="b200",
        kind="bfloat16",
        framework="simumax",
        extents=extents,
        result_bytes=np.array([4.0 if s["out_dtype"] == "fp32" else 2.0 for s in stated]),
        time_ns=1e9 * 2 * extents.prod(0) / (np.array(shares) * _SIMUMAX_PEAK),
        held_out=np.array([held.holds("simumax_products", family) for family in families]),
        sustained=True,
        layouts=np.array([_layout(s) for s in stated]),
    )


def _layout(stated: Mapping[str, str]) -> str:
    name = {"TN": "forward", "NN": "dgrad", "NT": "wgrad"}[stated["layout"]]
    return name + (", fp32" if stated["out_dtype"] == "fp32" else "")
