"""Fit what libraries of experts' products differ by from cuBLAS, on public measurements.

    python tools/fit/fit_experts.py [--truth DIR]

Writes the tables of libraries into ``src/prismscale/cost/kernels`` (between the lines that say so),
what the measuring programs ran besides into ``validation/kernels/harness.toml``, and residuals into
``tools/fit/experts.json``. Each GPU and library is fitted by itself, to the least mean absolute
logarithmic error of its layers of experts that are spread evenly, have 64 rows an expert or more
and are of no family that is held out. To be run after ``fit_products.py``: constants are relative
to cuBLAS's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from fitting import (
    HARNESS,
    KERNELS,
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
from prismscale.cost.kernel_gemm import gemm_call_ns
from prismscale.cost.kernel_profile import KernelProfile, ProductLibrary
from prismscale.cost.kernel_signature import KernelCall, parse_signature
from prismscale.validation.kernels.grouped_rows import FEWEST_ROWS, GroupedRow, load_grouped
from prismscale.validation.kernels.measuring_programs import Harness

GROUPS = (
    ("a100-80g", "triton"),
    ("h100-sxm", "triton"),
    ("b200", "cutlass"),
    ("b200", "trtllm"),
)
LIBRARY_START, LIBRARY_BOUNDS = (0.7, 200.0, 0.75), ((0.1, 1.2), (0, 2_000), (0.2, 1))
OVERHEAD_START, OVERHEAD_BOUNDS = 20_000.0, (0, 200_000)
ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Rows of one GPU and library."""

    profile: KernelProfile
    library: str
    products: tuple[tuple[KernelCall, ...], ...]
    """Of each row."""
    rest_ns: NDArray[np.float64]
    """What each row's other kernels take."""
    time_ns: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[GroupedRow], gpu: str, library: str) -> Layers:
        """``rows``, and what no constant of the library changes."""
        profile = KernelProfile.load(gpu).burst()
        model = ModelledKernels(profile=profile)
        calls = [[parse_signature(s) for s in row.signatures] for row in rows]
        ours = [tuple(c for c in row if c.namespace == library) for row in calls]
        others = [[c for c in row if c.namespace != library] for row in calls]
        rest = [sum(model.cost_of_call(c).device_ns for c in row) for row in others]
        times = [row.time_ns for row in rows]
        return cls(
            profile=profile,
            library=library,
            products=tuple(ours),
            rest_ns=np.array(rest, float),
            time_ns=np.array(times, float),
        )

    def ratio(self, library: ProductLibrary, overhead_ns: float) -> NDArray[np.float64]:
        """Predicted over measured."""
        profile = replace(self.profile, libraries={self.library: library})
        products = [sum(gemm_call_ns(profile, call) for call in row) for row in self.products]
        return (np.array(products) + self.rest_ns + overhead_ns) / self.time_ns


def main() -> int:
    """Write the files; exit code 2 where there is no truth."""
    truth = truth_with("aiconfigurator", __doc__)
    if truth is None:
        return 2
    rows = [row for row in load_grouped(truth) if row.rows >= FEWEST_ROWS and row.is_even]
    written: dict[str, list[str]] = {}
    found, programs = {}, []
    for gpu, name in GROUPS:
        of_group = [row for row in rows if (row.gpu, row.group) == (gpu, name)]
        free = Layers.of([row for row in of_group if not row.held_out], gpu, name)
        library, program = fit(free)
        held_out = Layers.of([row for row in of_group if row.held_out], gpu, name)
        for part, layers in (("fitted", free), ("held out", held_out)):
            errors = 100 * (layers.ratio(library, program.overhead_ns) - 1)
            found[f"{gpu} {name}, {part}"] = residuals(errors.tolist())
        written.setdefault(gpu, []).append(f"[libraries.{name}]\n{table_of(library)}")
        programs.append(f'"{gpu} {name}" = {inline_table_of(program)}\n')
        print(gpu, name, library, program, flush=True)
    for gpu, tables in written.items():
        write_between(KERNELS / f"{gpu}.toml", "experts", "\n".join(tables))
    write_between(HARNESS, "experts", "[experts]\n" + "".join(sorted(programs)))
    write_residuals("experts", found)
    return 0


def fit(layers: Layers) -> tuple[ProductLibrary, Harness]:
    """The library, and what its measuring program ran besides."""

    def unpacked(x: Sequence[float]) -> tuple[ProductLibrary, float]:
        speed, k_overhead, memory_efficiency, overhead_ns = map(rounded, x)
        library = ProductLibrary(
            speed=speed, k_overhead=k_overhead, memory_efficiency=memory_efficiency
        )
        return library, overhead_ns

    def loss(x: Sequence[float]) -> float:
        return float(np.abs(np.log(layers.ratio(*unpacked(x)))).mean())

    start = (*LIBRARY_START, OVERHEAD_START)
    bounds = (*LIBRARY_BOUNDS, OVERHEAD_BOUNDS)
    library, overhead_ns = unpacked(minimised(loss, start, bounds, rounds=ROUNDS))
    return library, Harness(overhead_ns=overhead_ns)


if __name__ == "__main__":
    sys.exit(main())
