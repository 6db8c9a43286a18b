"""Fit the constants of a kernel profile on NeuSight's measurements, and say how well they hold.

    python tools/fit/fit_kernels.py [--truth DIR] [--gpu h100-sxm|a100-pcie] [--profile NAME]

Prints the fitted tables as TOML, to be copied into ``src/prismscale/cost/kernels``. Every kind is
fitted by itself, to the least mean absolute logarithmic error, without the models that the list of
held-out families names. ``errors`` are of the models that are left: each one's kernels are
predicted by constants fitted on the others' alone; the 90th percentile of the relative error is
written. A kind that one model alone has keeps twice the error of its fit.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from prismscale.cost.kernel import KernelModel, ModelledKernels
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_profile import GemmRoofline, KernelProfile, MemoryRoofline
from prismscale.cost.kernel_signature import parse_signature
from prismscale.validation.kernels.held_out import HeldOut

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from kernel_truth import Measurement, distinct, load_runs  # noqa: E402

DEFAULT_TRUTH = ROOT / ".." / "shared" / "truth"
Fitted = GemmRoofline | MemoryRoofline
GEMM_START = (0.9, 50.0, 12.0, 2_000.0)
GEMM_BOUNDS = ((0.3, 1.2), (0.0, 2_000.0), (0.0, 60.0), (500.0, 6_000.0))
MEMORY_START = (0.8, 2_500.0)
MEMORY_BOUNDS = ((0.05, 1.0), (1_500.0, 8_000.0))


def main() -> int:
    """Print the tables; exit code 2 where there is no truth."""
    options = _options()
    if not (options.truth / "neusight" / "label").is_dir():
        print(f"no public truth at {options.truth}: give it with --truth DIR", file=sys.stderr)
        return 2
    profile = KernelProfile.load(options.profile)
    errors = {}
    held = HeldOut.load()
    runs = load_runs(options.truth, options.gpu)
    free = [run for run in runs if not held.holds("neusight", run.model)]
    for kind, points in sorted(by_kind(distinct(free)).items()):
        fitted = fit(profile, kind, points)
        errors[kind] = held_out_errors(profile, kind, points)
        _print_law(kind, fitted, points, relative_errors(with_law(profile, kind, fitted), points))
    print("[errors]")
    for kind, found in errors.items():
        print(f"{kind} = {np.quantile(found, 0.9):.3f}  # median {np.median(found):.3f}")
    return 0


def by_kind(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Measurements by the kind of their first kernel."""
    groups = defaultdict(list)
    for measurement in measurements:
        groups[kind_of(parse_signature(measurement.signatures[0]))].append(measurement)
    return groups


def fit(profile: KernelProfile, kind: str, points: Sequence[Measurement]) -> Fitted:
    """The roofline of ``kind`` that fits ``points`` best."""
    start, bounds = (GEMM_START, GEMM_BOUNDS) if kind == "gemm" else (MEMORY_START, MEMORY_BOUNDS)

    def loss(values: Sequence[float]) -> float:
        trial = with_law(profile, kind, _law(profile, kind, values))
        return float(np.mean(np.abs(np.log1p(signed_errors(trial, points)))))

    found = minimize(loss, start, method="Nelder-Mead", bounds=bounds, options={"maxfev": 400})
    return _law(profile, kind, found.x)


def held_out_errors(
    profile: KernelProfile, kind: str, points: Sequence[Measurement]
) -> list[float]:
    """Errors of each model's points under constants fitted on the other models'."""
    models = sorted({p.model for p in points})
    if len(models) == 1:
        roofline = fit(profile, kind, points)
        return [2 * e for e in relative_errors(with_law(profile, kind, roofline), points)]
    errors: list[float] = []
    for model in models:
        roofline = fit(profile, kind, [p for p in points if p.model != model])
        held = [p for p in points if p.model == model]
        errors += relative_errors(with_law(profile, kind, roofline), held)
    return errors


def relative_errors(profile: KernelProfile, points: Sequence[Measurement]) -> list[float]:
    """``|predicted / measured - 1|``."""
    return [abs(e) for e in signed_errors(profile, points)]


def signed_errors(profile: KernelProfile, points: Sequence[Measurement]) -> list[float]:
    """``predicted / measured - 1``."""
    model = ModelledKernels(profile=profile)
    return [predicted_ns(model, point) / point.time_ns - 1 for point in points]


def predicted_ns(model: KernelModel, point: Measurement) -> float:
    """What the measuring program would have read."""
    kernels = sum(model.cost(signature).device_ns for signature in point.signatures)
    return point.machine.overhead_ns + kernels


def with_law(profile: KernelProfile, kind: str, roofline: Fitted) -> KernelProfile:
    """``profile`` with the roofline of ``kind`` replaced."""
    if isinstance(roofline, GemmRoofline):
        return replace(profile, gemm={**profile.gemm, "Float": roofline})
    return replace(profile, memory={**profile.memory, kind: roofline})


def _law(profile: KernelProfile, kind: str, values: Sequence[float]) -> Fitted:
    if kind == "gemm":
        efficiency, k_overhead, tile, base = (float(v) for v in values)
        return replace(
            profile.gemm["Float"],
            efficiency=efficiency,
            k_overhead=k_overhead,
            tile_overhead=tile,
            base_ns=base,
        )
    return replace(profile.memory[kind], efficiency=float(values[0]), base_ns=float(values[1]))


def _print_law(
    kind: str, roofline: Fitted, points: Sequence[Measurement], errors: Sequence[float]
) -> None:
    print(f"[{'gemm.Float' if kind == 'gemm' else f'memory.{kind}'}]")
    print(
        f"# {len(points)} points; fit: median {np.median(errors):.3f}, "
        f"p90 {np.quantile(errors, 0.9):.3f}"
    )
    print(f"efficiency = {roofline.efficiency:.3f}")
    if isinstance(roofline, GemmRoofline):
        print(f"k_overhead = {roofline.k_overhead:.0f}")
        print(f"tile_overhead = {roofline.tile_overhead:.3g}")
    print(f"base_ns = {roofline.base_ns:.0f}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--gpu", choices=("h100-sxm", "a100-pcie"), default="h100-sxm")
    parser.add_argument("--profile", default="h100-sxm", help="Profile to start from.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
