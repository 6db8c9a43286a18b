"""Write predictions that tests hold the kernel model to: ``tests/cost/frozen_predictions.json``.

    python tools/fit/freeze_predictions.py

To be run, and its output committed, by whoever means to change predictions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.cost.kernel_signature import FIELD

FILE = Path(__file__).resolve().parents[2] / "tests" / "cost" / "frozen_predictions.json"
PRODUCTS = ((1, 4096, 4096), (128, 4096, 1024), (2048, 2048, 2048), (4096, 14336, 4096))
MORE_PRODUCTS = ((8192, 8192, 8192), (8192, 128256, 4096), (16384, 512, 7168), (300, 700, 65536))
DTYPES = ("BFloat16", "Half", "Float8_e4m3fn", "Float")
ELEMENTWISE = ("mul.Tensor", "native_layer_norm", "_softmax", "sum", "clone", "embedding", "sort")


def main() -> int:
    """Write the file."""
    signatures = [*_products(), *_attention(), *_memory()]
    frozen = {}
    for gpu in KernelProfile.names():
        model = load_kernel_model(gpu)
        frozen[gpu] = {s: model.cost(s).device_ns for s in signatures}
    FILE.write_text(json.dumps(frozen, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(map(len, frozen.values()))} predictions: {FILE}")
    return 0


def _call(name: str, inputs: str, outputs: str, arguments: str = "") -> str:
    return FIELD.join((f"aten::{name}", inputs, outputs, arguments))


def _products() -> Iterator[str]:
    for m, n, k in (*PRODUCTS, *MORE_PRODUCTS):
        for dtype in DTYPES:
            yield _call("mm", f"{dtype}[{m},{k}];{dtype}[{k},{n}]", f"{dtype}[{m},{n}]")
    yield _call(
        "_grouped_mm", "BFloat16[8192,4096];BFloat16[8,4096,4096];Int[8]", "BFloat16[8192,4096]"
    )


def _attention() -> Iterator[str]:
    for family in ("flash", "efficient", "cudnn"):
        for length in (512, 8192):
            shape = f"BFloat16[1,32,{length},128]"
            name = f"_scaled_dot_product_{family}_attention"
            yield _call(name, ";".join([shape] * 3), shape, "is_causal=1")
            yield _call(f"{name}_backward", ";".join([shape] * 6), shape, "is_causal=1")


def _memory() -> Iterator[str]:
    for name in ELEMENTWISE:
        for rows in (16, 8192):
            yield _call(name, f"Float[{rows},8192]", f"Float[{rows},8192]")


if __name__ == "__main__":
    sys.exit(main())
