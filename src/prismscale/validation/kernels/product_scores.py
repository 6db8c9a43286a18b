"""Scores matrix products on public measurements of families on which nothing was fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_profile import KernelProfile, ScaledGpu
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.kernels.product_rows import (
    ROOFLINE_SHARE,
    ProductRows,
    load_products,
)
from prismscale.validation.rows import Row

SMALLEST, LARGE_FLOPS = 256, 1e11
ROOFLINE = f"roofline at {100 * ROOFLINE_SHARE:.0f} %"
REMARKS = (
    "Products: rows of families (N, K) that nothing was fitted on (validation/kernels/"
    "held_out.toml, drawn before the fit), with no extent below 256; each row counts once. Bias is "
    "the median of predicted over measured less one: positive is too slow. Bursts are "
    "aiconfigurator's, held against the model without the power limit.",
    "8-bit rows hold the quantisation of the activations too, which each framework does its own "
    "way: its share of the bandwidth and its launches are constants of the measuring programs "
    "(harness.toml), fitted on the other families. `fp8` is scaled per tensor or per token, "
    "`fp8_block` by blocks; both are held against the same products of 8-bit floats.",
    "`nvfp4` (4-bit floats with a scale for 16) has no bar; its rows hold quantisation, too.",
    "8-bit products on an H100: TensorRT-LLM's rows are of cuBLAS; vLLM's and SGLang's, scaled row "
    "by row, are of other kernels, which take up to 1.8 times as long where N and K both exceed "
    "17,000. One law prices both, which is what p90 above 100 GFLOP is about.",
    "Frameworks measure the same library's kernels 5 to 10 % apart, also on one GPU: their biases "
    "are shown apart, and no constant can remove both.",
    "Sustained: SimuMax's products of training steps on a B200, which ran at the power limit. "
    "No such rows are public for other GPUs: an H100's is of three products that one ran "
    "(bench/gpu/sustained.py), what lasts on others is shifted by the watts for each FLOP/s.",
    "No public rows of MXFP8 or TF32 products were found: they are priced as other 8-bit products, "
    "and at half the rate of 16 bits.",
    "From a data sheet: the constants of another GPU with this one's peaks, bandwidth, "
    "multiprocessors, clocks and power, on all rows. This is not blind: that power moves the share "
    "of the peak by an exponent of 0.25, and that the L2 cache's bandwidth goes with the peak, was "
    "seen in the constants of all three GPUs, the one that is predicted among them.",
)


_EIGHT_BITS = (Bars(median=12, p90=30), Bars(median=8, p90=20))
BURST = (
    ("bfloat16", Bars(median=10, p90=25, bias=2), Bars(median=6, p90=15, bias=2)),
    ("fp8", *_EIGHT_BITS),
    ("fp8_block", *_EIGHT_BITS),
    ("nvfp4", Bars(), Bars()),
)
"""Kind of product, bars of all rows, bars of rows above 100 GFLOP."""
DATA_SHEET = Bars(median=12, bias=8)
FROM = (
    ("b200", "h100-sxm"),
    ("h100-sxm", "a100-80g"),
    ("h100-sxm", "b200"),
    ("a100-80g", "h100-sxm"),
)
"""Pairs of a GPU and another GPU with whose constants it is predicted."""


def validate(truth: Path) -> Iterator[Row]:
    """Yield all rows.

    Raises:
        UsageError: there are no tables below ``truth``.
    """
    tables = load_products(truth)
    profiles = {gpu: KernelProfile.load(gpu) for gpu in {t.gpu for t in tables}}
    yield from _bursts(tables, profiles)
    yield from _sustained(tables, profiles)
    yield from _data_sheets(tables)


def _bursts(tables: Sequence[ProductRows], profiles: dict[str, KernelProfile]) -> Iterator[Row]:
    for gpu in sorted(profiles):
        for kind, all_bars, large_bars in BURST:
            rows = [t for t in tables if (t.gpu, t.kind, t.sustained) == (gpu, kind, False)]
            if not rows:
                continue
            errors = [_errors(t, profiles[gpu]) for t in rows]
            name = f"{gpu} product {kind}"
            every = np.concatenate([e for e, _ in errors])
            thumb = np.concatenate([_by_thumb(t, profiles[gpu]) for t in rows])
            yield from error_rows(name, every, all_bars, others={ROOFLINE: thumb})
            is_large = np.concatenate([large for _, large in errors])
            large, others = every[is_large], {ROOFLINE: thumb[is_large]}
            yield from error_rows(f"{name} > 100 GFLOP", large, large_bars, others=others)
            for table, (error, _) in zip(rows, errors, strict=True):
                yield from error_rows(f"{name}, {table.framework} alone", error)


def _sustained(tables: Sequence[ProductRows], profiles: dict[str, KernelProfile]) -> Iterator[Row]:
    for table in tables:
        if table.sustained:
            error, is_large = _errors(table, profiles[table.gpu])
            name = f"{table.gpu} product {table.kind}, sustained"
            yield from error_rows(name, error)
            yield from error_rows(f"{name} > 100 GFLOP", error[is_large])
            if table.layouts is None:
                continue
            layouts = table.layouts[_counted(table)]
            for layout in sorted(set(layouts)):
                yield from error_rows(f"{name}, {layout}", error[layouts == layout])


def _data_sheets(tables: Sequence[ProductRows]) -> Iterator[Row]:
    for gpu, other in FROM:
        rows = [t for t in tables if (t.gpu, t.kind, t.sustained) == (gpu, "bfloat16", False)]
        if rows:
            profile = by_data_sheet(KernelProfile.load(gpu), other)
            error = np.concatenate([_errors(t, profile, every_family=True)[0] for t in rows])
            yield from error_rows(f"{gpu} product bfloat16 from {other}", error, DATA_SHEET)


def by_data_sheet(gpu: KernelProfile, other: str) -> KernelProfile:
    """Return ``gpu`` as if it had never been measured: with the constants of ``other``."""
    return ScaledGpu(
        name=gpu.name,
        device=gpu.device,
        scaled_from=other,
        multiprocessors=gpu.multiprocessors,
        memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        peak_flops={dtype: roofline.peak_flops for dtype, roofline in gpu.gemm.items()},
        power_watts=gpu.power_watts,
        clock_headroom=gpu.clock_headroom,
    ).profile()


def _errors(
    table: ProductRows, profile: KernelProfile, *, every_family: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the signed errors, in %, of the rows that count, and which of these rows are large."""
    counted = _counted(table, every_family=every_family)
    error = 100 * (table.predicted_ns(profile) / table.time_ns - 1)
    return error[counted], 2 * table.extents.prod(0)[counted] > LARGE_FLOPS


def _by_thumb(table: ProductRows, profile: KernelProfile) -> NDArray[np.float64]:
    """Return the signed errors of a roofline, in %, of the rows that count."""
    error: NDArray[np.float64] = 100 * (table.roofline_ns(profile) / table.time_ns - 1)
    return error[_counted(table)]


def _counted(table: ProductRows, *, every_family: bool = False) -> NDArray[np.bool_]:
    return (table.extents[1:].min(0) >= SMALLEST) & (table.held_out | every_family)
