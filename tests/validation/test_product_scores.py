"""Matrix products against tables of measurements."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import FIELD
from prismscale.errors import UsageError
from prismscale.validation.error_rows import worst_first
from prismscale.validation.kernels.held_out import HeldOut
from prismscale.validation.kernels.measuring_programs import Harness
from prismscale.validation.kernels.product_rows import load_products
from prismscale.validation.kernels.product_scores import by_data_sheet, validate

HELD = next(iter(sorted(HeldOut.load().families["aiconfigurator_gemm"], reverse=True)))


def write(truth: Path, factor: float = 1.0) -> None:
    """Rows of one held-out family and one other, ``factor`` times as long as on our H100."""
    n, k = (int(part.partition("=")[2]) for part in HELD.split(","))
    model = ModelledKernels(profile=KernelProfile.load("h100-sxm").burst())
    lines = ["kernel_source,gemm_dtype,m,n,k,latency_ms"]
    for m, columns, inner in ((512, n, k), (4096, n, k), (4096, 300, 300)):
        dtype = "BFloat16"
        read = f"{dtype}[{m},{inner}];{dtype}[{inner},{columns}]"
        cost = model.cost(FIELD.join(("aten::mm", read, f"{dtype}[{m},{columns}]", "")))
        lines.append(f"x,bfloat16,{m},{columns},{inner},{factor * cost.device_ns / 1e6}")
    path = truth / "aiconfigurator" / "h100_sxm__gemm_perf__mine_1.0.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def test_list_names_held_out_families_only() -> None:
    """A family that was not drawn may be fitted; of a whole set nothing may."""
    held = HeldOut.load()

    assert held.holds("aiconfigurator_gemm", HELD)
    assert not held.holds("aiconfigurator_gemm", "n=300,k=300")
    assert held.holds("tracelens", "anything")


def test_vectorised_law_is_the_one_that_prices_calls(tmp_path: Path) -> None:
    """Tables are held against what the null device would charge, to the nanosecond."""
    write(tmp_path)
    (rows,) = load_products(tmp_path)

    predicted = rows.predicted_ns(KernelProfile.load("h100-sxm"))

    assert np.abs(predicted - rows.time_ns).max() < 1
    assert rows.held_out.tolist() == [True, True, False]


def test_scores_are_of_held_out_rows(tmp_path: Path) -> None:
    """Measurements twice as long: an error of half, of the two rows that are held out."""
    write(tmp_path, factor=2.0)
    rows = list(validate(tmp_path))
    bias = next(r for r in rows if r.name == "h100-sxm product bfloat16 (2 rows): bias")

    assert bias.value == pytest.approx(-50, abs=0.1)
    assert not all(row.ok for row in rows)


def test_bars_come_before_rows_without_one(tmp_path: Path) -> None:
    """The worst first."""
    write(tmp_path, factor=2.0)
    bars = [
        row.value / row.bar if row.bar else 0.0 for row in worst_first(list(validate(tmp_path)))
    ]

    assert bars == sorted(bars, reverse=True)


def test_harness_adds_what_it_ran_beside() -> None:
    """Launches, quantised activations, and a thread that cannot issue faster."""
    extents = np.array([[1.0], [1000.0], [10.0], [1000.0]])
    time_ns = np.array([1000.0])
    quantised = Harness(overhead_ns=500.0, quantise_share=0.5)

    assert quantised.measured_ns(time_ns, extents, bandwidth=1e12) == pytest.approx([7500.0])
    slow = replace(quantised, floor_ns=9000.0)
    assert slow.measured_ns(time_ns, extents, bandwidth=1e12) == pytest.approx([9000.0])


def test_gpu_by_its_own_constants_is_itself() -> None:
    """Scaling from a GPU with the same data sheet changes nothing."""
    h100 = KernelProfile.load("h100-sxm")

    assert by_data_sheet(h100, "h100-sxm").gemm == h100.gemm


def test_folder_without_tables_is_refused(tmp_path: Path) -> None:
    """Says what is expected there."""
    with pytest.raises(UsageError, match="gemm_perf"):
        load_products(tmp_path)
