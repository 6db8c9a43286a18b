"""Fit the law of matrix products on public measurements, and say how well it holds.

    python tools/fit/fit_products.py [--truth DIR]

Writes the products of ``a100-80g``, ``h100-sxm`` and ``b200`` into their files in
``src/prismscale/cost/kernels`` (between the lines that say so), what the measuring programs ran
besides into ``validation/kernels/harness.toml``, and residuals of fitted and of held-out rows into
``tools/fit/products.json``. Each GPU and element type is fitted by itself, to the least mean
absolute logarithmic error of a seeded sample of the rows that are not held out; rows with an extent
below 256 count a fifth. What lasts is fitted after the bursts: on SimuMax's rows of a B200, each
weighted by its time (a step is the sum of its products, and what takes long feels the limit), and
on three products that an H100 ran on and on (``bench/gpu/sustained.py``; its layer of a model is
not fitted). The two say with which exponent of its power the A100's is shifted from the H100's: it
is printed, and stands as ``SUSTAINED_EXPONENT`` in ``cost/kernel_profile.py``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from fitting import (
    HARNESS,
    KERNELS,
    ROOT,
    inline_table_of,
    minimised,
    residuals,
    rounded,
    table_of,
    truth_with,
    write_between,
    write_residuals,
)
from numpy.typing import NDArray

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import SUSTAINED_EXPONENT, GemmRoofline, KernelProfile
from prismscale.cost.kernel_signature import FIELD
from prismscale.validation.kernels.measuring_programs import Harness
from prismscale.validation.kernels.product_rows import DTYPES, ProductRows, load_products

KINDS = ("bfloat16", "fp8", "nvfp4")
ALSO = {
    "bfloat16": ("BFloat16", "Half"),
    "fp8": ("Float8_e4m3fn", "Float8_e5m2"),
    "nvfp4": ("Float4_e2m1fn_x2",),
}
FIELDS = (
    "efficiency",
    "k_overhead",
    "tile_overhead",
    "base_ns",
    "memory_efficiency",
    "wave_rounding",
    "cache_factor",
)
START = (0.85, 150.0, 14.0, 2_600.0, 0.75, 0.3, 3.0)
BOUNDS = ((0.3, 1.1), (0, 2_000), (0, 60), (500, 9_000), (0.3, 1), (0, 1), (0.5, 8))
HARNESS_START, HARNESS_BOUNDS = (2_000.0, 0.4), ((0, 20_000), (0.05, 1))
SAMPLE, ROUNDS = 1_500, 3
SMALL, SMALL_WEIGHT = 256, 0.2
SUSTAINED = ROOT / "bench" / "results" / "h100" / "sustained.json"


def main() -> int:
    """Write the files; exit code 2 where there is no truth."""
    truth = truth_with("aiconfigurator", __doc__)
    if truth is None:
        return 2
    tables = load_products(truth)
    profiles: dict[str, KernelProfile] = {}
    harnesses: dict[str, Harness] = {}
    for gpu in ("b200", "h100-sxm", "a100-80g"):
        profile = KernelProfile.load(gpu)
        for kind in KINDS:
            rows = [t for t in tables if t.gpu == gpu and t.kind == kind and not t.sustained]
            if rows:
                profile, found = fit(profile, rows)
                harnesses |= found
                print(gpu, kind, profile.gemm[DTYPES[kind]], flush=True)
        profiles[gpu] = profile
    _fit_block_harnesses(tables, profiles, harnesses)
    for gpu, cap in _caps(profiles, next(t for t in tables if t.sustained)).items():
        profiles[gpu] = with_cap(profiles[gpu], cap)
        _write_products(KERNELS / f"{gpu}.toml", profiles[gpu])
    _write_harnesses(harnesses)
    _write_residuals(tables, profiles, harnesses)
    return 0


def fit(
    profile: KernelProfile, tables: Sequence[ProductRows]
) -> tuple[KernelProfile, dict[str, Harness]]:
    """``profile`` with the products of one element type, and the measuring programs."""
    kind = tables[0].kind
    samples = [_sample(table) for table in tables]
    quantised = kind != "bfloat16"
    start = [*START, *(HARNESS_START * len(tables) if quantised else ())]
    bounds = [*BOUNDS, *(HARNESS_BOUNDS * len(tables) if quantised else ())]

    def unpacked(x: Sequence[float]) -> tuple[KernelProfile, list[ProductRows]]:
        trial = _with_products(profile, kind, x[: len(FIELDS)])
        rest = x[len(FIELDS) :]
        used = [
            replace(s, harness=Harness(overhead_ns=rest[2 * i], quantise_share=rest[2 * i + 1]))
            if quantised
            else s
            for i, s in enumerate(samples)
        ]
        return trial, used

    def loss(x: Sequence[float]) -> float:
        trial, used = unpacked([float(v) for v in x])
        return _loss(trial, used)

    fitted, used = unpacked(minimised(loss, start, bounds, rounds=ROUNDS))
    return fitted, {s.name: s.harness for s in used if quantised}


def _caps(profiles: dict[str, KernelProfile], of_b200: ProductRows) -> dict[str, float]:
    """Share of the peak that lasts, by GPU."""
    b200, h100, a100 = (profiles[gpu] for gpu in ("b200", "h100-sxm", "a100-80g"))
    rows = _part(of_b200, ~of_b200.held_out)
    caps = {
        "b200": fit_cap(lambda cap: _loss_by_time(with_cap(b200, cap), rows)),
        "h100-sxm": fit_cap(lambda cap: _lasting_loss(with_cap(h100, cap))),
    }
    shares = caps["h100-sxm"] / caps["b200"] / (h100.clock_headroom / b200.clock_headroom)
    print("SUSTAINED_EXPONENT", np.log(shares) / np.log(_watts(b200, h100)))
    headroom = a100.clock_headroom / h100.clock_headroom
    shifted = caps["h100-sxm"] * headroom * _watts(h100, a100) ** SUSTAINED_EXPONENT
    return {**caps, "a100-80g": shifted}


def fit_cap(loss: Callable[[float], float]) -> float:
    """The cap at which ``loss`` is least."""
    trials = np.arange(0.4, 1.2, 0.002)
    return float(trials[int(np.argmin([loss(float(cap)) for cap in trials]))])


def _lasting_loss(profile: KernelProfile) -> float:
    """Of the products that an H100 ran until their speed changed no more."""
    model = ModelledKernels(profile=profile)
    figures = json.loads(SUSTAINED.read_text(encoding="utf-8"))["figures"]
    wrong = []
    for name, figure in figures.items():
        if name.startswith("mm "):
            m, n, k = re.findall(r"\d+", name)
            factors = f"BFloat16[{m},{k}];BFloat16[{k},{n}]@1,{k}"
            cost = model.cost(FIELD.join(("aten::mm", factors, f"BFloat16[{m},{n}]", "")))
            wrong.append(np.log(cost.device_ns / figure["sustained_ns"]))
    return float(np.mean(np.square(wrong)))


def with_cap(profile: KernelProfile, cap: float) -> KernelProfile:
    """``profile`` whose tensor cores keep up ``cap`` of their peak."""
    capped = [t for kind in KINDS for t in ALSO[kind] if t in profile.gemm]
    gemm = {t: replace(profile.gemm[t], sustained_cap=round(cap, 3)) for t in capped}
    return replace(profile, gemm={**profile.gemm, **gemm})


def _watts(one: KernelProfile, other: KernelProfile) -> float:
    """Watts for each FLOP/s of the highest clock's peak, of ``other`` relative to ``one``."""
    peaks = (p.gemm["BFloat16"].peak_flops * p.clock_headroom for p in (one, other))
    each = [(p.power_watts or 1) / peak for p, peak in zip((one, other), peaks, strict=True)]
    return each[1] / each[0]


def _fit_block_harnesses(
    tables: Sequence[ProductRows],
    profiles: dict[str, KernelProfile],
    harnesses: dict[str, Harness],
) -> None:
    """Blockwise rows are held against the products of 8-bit floats; only their programs differ."""
    for table in tables:
        if table.kind != "fp8_block":
            continue
        rows = _sample(table)
        start = (*HARNESS_START, float(np.quantile(table.time_ns, 0.02)))

        def loss(x: Sequence[float], rows: ProductRows = rows) -> float:
            return _loss(profiles[rows.gpu], [replace(rows, harness=_harness(x))])

        bounds = (*HARNESS_BOUNDS, (0, 400_000))
        harnesses[table.name] = _harness(minimised(loss, start, bounds))


def _harness(x: Sequence[float]) -> Harness:
    return Harness(overhead_ns=float(x[0]), quantise_share=float(x[1]), floor_ns=float(x[2]))


def _loss(profile: KernelProfile, tables: Sequence[ProductRows]) -> float:
    wrong = weights = 0.0
    for table in tables:
        large = table.extents[1:].min(0) >= SMALL
        weight = np.where(large, 1.0, SMALL_WEIGHT)
        wrong += float((weight * np.abs(np.log(table.predicted_ns(profile) / table.time_ns))).sum())
        weights += float(weight.sum())
    return wrong / weights


def _loss_by_time(profile: KernelProfile, table: ProductRows) -> float:
    wrong = np.abs(np.log(table.predicted_ns(profile) / table.time_ns))
    return float((wrong * table.time_ns).sum() / table.time_ns.sum())


def _sample(table: ProductRows) -> ProductRows:
    """A seeded sample of the rows that may be fitted, each table in proportion to its rows."""
    free = np.flatnonzero(~table.held_out)
    chosen = np.random.default_rng(0).permutation(free)[: max(1, len(free) * SAMPLE // 20_000)]
    mask = np.zeros(len(table.time_ns), bool)
    mask[chosen] = True
    return _part(table, mask)


def _part(table: ProductRows, mask: NDArray[np.bool_]) -> ProductRows:
    return replace(
        table,
        extents=table.extents[:, mask],
        result_bytes=table.result_bytes[mask],
        time_ns=table.time_ns[mask],
        held_out=table.held_out[mask],
    )


def _with_products(profile: KernelProfile, kind: str, x: Sequence[float]) -> KernelProfile:
    values = dict(zip(FIELDS, map(rounded, x), strict=True))
    gemm = {
        dtype: GemmRoofline(peak_flops=profile.gemm[dtype].peak_flops, **values)
        for dtype in ALSO[kind]
    }
    return replace(profile, gemm={**profile.gemm, **gemm})


def _write_products(path: Path, profile: KernelProfile) -> None:
    tables = []
    for dtype in (t for kind in KINDS for t in ALSO[kind]):
        roofline = profile.gemm.get(dtype)
        if roofline is None or roofline.sustained_cap is None:
            continue
        tables.append(f"[gemm.{dtype}]\n{table_of(roofline)}")
    write_between(path, "products", "\n".join(tables))


def _write_harnesses(harnesses: dict[str, Harness]) -> None:
    lines = ["[programs]\n"]
    for name, harness in sorted(harnesses.items()):
        lines.append(f'"{name}" = {inline_table_of(harness)}\n')
    write_between(HARNESS, "products", "".join(lines))


def _write_residuals(
    tables: Sequence[ProductRows],
    profiles: dict[str, KernelProfile],
    harnesses: dict[str, Harness],
) -> None:
    found = {}
    for table in tables:
        rows = replace(table, harness=harnesses.get(table.name, Harness()))
        error = 100 * (rows.predicted_ns(profiles[table.gpu]) / table.time_ns - 1)
        large = table.extents[1:].min(0) >= SMALL
        for part, mask in (("fitted", ~table.held_out), ("held out", table.held_out)):
            found[f"{table.name}, {part}"] = residuals(error[mask & large])
    write_residuals("products", found)


if __name__ == "__main__":
    sys.exit(main())
