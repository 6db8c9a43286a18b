"""Write predictions that tests hold kernels and communication to: frozen_predictions.json.

    python tools/fit/freeze_predictions.py

To be run, and its output committed, by whoever means to change predictions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prismscale.cluster import Cluster
from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.steps.price_version import call_signatures, communication_ns

FILE = Path(__file__).resolve().parents[2] / "tests" / "cost" / "frozen_predictions.json"
CLUSTERS = ("a100-80g", "b200", "b300", "gb200", "gb300", "h100-96g", "h100-sxm", "h200-sxm")


def main() -> int:
    """Write the file."""
    signatures = list(call_signatures())
    frozen: dict[str, dict[str, float]] = {}
    for gpu in KernelProfile.names():
        model = load_kernel_model(gpu)
        frozen[gpu] = {s: model.cost(s).device_ns for s in signatures}
    for name in CLUSTERS:
        frozen[f"communication of {name}"] = communication_ns(Cluster.load(name))
    FILE.write_text(json.dumps(frozen, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(map(len, frozen.values()))} predictions: {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
