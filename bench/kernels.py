"""Accuracy of the kernel model on public measurements.

    python bench/kernels.py [--truth DIR] [--json PATH]

Operators: NeuSight's rows, each predicted by constants that were fitted on the other models' rows
(see ``tools/fit/fit_kernels.py``, which the profiles in ``cost/kernels`` come from). Whole models:
NeuSight's totals against the sum of the profile's figures for the kernels of all layers. Peaks:
the largest matrix-product throughput that stas00's ml-engineering measured, against the model at
that shape. Iterations: vTrain's rows without tensor parallelism, against the sum of their kernels
(see ``kernel_layers.py``). NeuSight's A100 forward totals exceed the sum of its own rows by as
much as they exceed the model's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kernel_layers import load_iterations, predicted_ns
from kernel_truth import FIELD, ModelRun, distinct, load_runs
from prismscale.cost.kernel import KernelModel, ModelledKernels, load_kernel_model
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.rows import Row, finish

# Maximum achievable matmul (tables/stas00__ml-engineering_network_mamf.csv): GPU, element type,
# M x N x K, TFLOPS.
PEAKS = (
    ("h100-sxm", "BFloat16", (2048, 2048, 13312), 794.5),
    ("h100-sxm", "Float8_e4m3fn", (1024, 9216, 14336), 1402.6),
    ("h200-sxm", "Float8_e4m3fn", (1280, 4096, 12032), 1453.4),
    ("a100-80g", "BFloat16", (1024, 10240, 5120), 271.2),
    ("a100-pcie", "BFloat16", (2048, 5120, 6144), 252.9),
    ("b200", "BFloat16", (1792, 16128, 3072), 1745.0),
    ("b200", "Float8_e4m3fn", (15360, 4096, 3072), 3432.5),
)
LARGE = 8 * 1024
"""Sequences times width of a microbatch from which vTrain's rows are bound by the GPU."""
MEDIAN_BAR = {"gemm": 9.4, "softmax": 19.5, "norm": 11.0, "norm_backward": 67.0}
"""Medians of NeuSight's own predictions on the H100, in %."""

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fit"))

from fit_kernels import DEFAULT_TRUTH, by_kind, held_out_errors  # noqa: E402


def main() -> int:
    """Print the table; exit code 1 where a bar is missed, 2 where there is no truth."""
    options = _options()
    if not (options.truth / "neusight" / "label").is_dir():
        print(f"no public truth at {options.truth}: give it with --truth DIR", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for gpu in ("h100-sxm", "a100-pcie"):
        runs = load_runs(options.truth, gpu)
        rows += [*_operator_rows(gpu, runs), *_model_rows(gpu, runs)]
    rows += [*_peak_rows(), *_iteration_rows(options.truth)]
    return finish(rows, title="Kernel model", json_path=options.json)


def _operator_rows(gpu: str, runs: Sequence[ModelRun]) -> Iterator[Row]:
    profile = KernelProfile.load(gpu)
    for kind, points in sorted(by_kind(distinct(list(runs))).items()):
        errors = 100 * np.asarray(held_out_errors(profile, kind, points))
        name = f"{gpu} {kind}, held out ({len(errors)} points)"
        median = float(np.median(errors))
        if gpu == "h100-sxm" and kind in MEDIAN_BAR:
            yield Row.at_most(f"{name}: median error", median, MEDIAN_BAR[kind], "%")
        else:
            yield Row.told(f"{name}: median error", median, "%")
        yield Row.told(f"{name}: p90 error", float(np.quantile(errors, 0.9)), "%")


def _model_rows(gpu: str, runs: Sequence[ModelRun]) -> Iterator[Row]:
    model = load_kernel_model(gpu)
    signed: dict[str, list[float]] = {"forward": [], "backward": []}
    for run in runs:
        for part, measured in (("forward", run.forward_ns), ("backward", run.backward_ns)):
            if measured:
                signed[part].append(100 * (_total_ns(model, run, part) / measured - 1))
    for part, errors in signed.items():
        if not errors:
            continue
        name = f"{gpu} whole models, {part} ({len(errors)} runs)"
        yield Row.told(f"{name}: median error", float(np.median(np.abs(errors))), "%")
        yield Row.told(f"{name}: worst error", float(np.max(np.abs(errors))), "%")
        yield Row.told(f"{name}: median bias", float(np.median(errors)), "%")


def _total_ns(model: KernelModel, run: ModelRun, part: str) -> float:
    parts = ("forward",) if part == "forward" else ("backward", "accumulate")
    total = 0.0
    for found in run.measurements:
        if found.part in parts:
            once = sum(model.cost(signature).device_ns for signature in found.signatures)
            total += once * (run.layers if found.in_block else 1)
    return total


def _peak_rows() -> Iterator[Row]:
    for gpu, dtype, (m, n, k), tflops in PEAKS:
        read, written = f"{dtype}[{m},{k}];{dtype}[{k},{n}]", f"BFloat16[{m},{n}]"
        model = ModelledKernels(profile=KernelProfile.load(gpu).burst())
        cost = model.cost(FIELD.join(("aten::mm", read, written, "")))
        ratio = 2 * m * n * k / cost.device_ns / 1e3 / tflops
        yield Row.told(f"{gpu} {dtype} {m}x{n}x{k}: model / best measured TFLOPS", ratio)


def _iteration_rows(truth: Path) -> Iterator[Row]:
    model = load_kernel_model("a100-80g")
    known = list(load_iterations(truth))
    # Smaller microbatches are launch-bound: 3.5 ms a layer, whatever its kernels.
    large = [row for row in known if row.batch * row.hidden >= LARGE]
    for what, rows in (("all", known), ("large microbatches", large)):
        signed = np.array([100 * (predicted_ns(model, row) / row.time_ns - 1) for row in rows])
        name = f"vTrain A100 without TP, kernels alone, {what} ({len(rows)} rows)"
        yield Row.told(f"{name}: median bias", float(np.median(signed)), "%")
        yield Row.told(f"{name}: p90 error", float(np.quantile(np.abs(signed), 0.9)), "%")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
