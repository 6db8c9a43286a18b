"""Fit the time that an operator takes of the host.

    python tools/fit/fit_host.py RUNS… [--truth DIR]

RUNS are the folders ``runs`` in the ``--work`` of ``bench/megatron_golden_steps.py``. Each kept run
of the family that may be fitted (``prismscale/validation/steps/golden_rows.py``) tells how much
slower the host would have to be for its step to be as long as the test logged. Views and the
launches after an operator's first keep their prices, so the rest is an operator's. Steps that the
device decides, which a host of half the pace makes less than half as long again, say nothing and
are left out. The constant is the median over the tests. Prints ``op_ns`` of an x86 host, and how
much slower than it nine of ten tests are at most; writes what each test gave into
``tools/fit/host.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from fitting import DEFAULT_TRUTH, ROOT

from prismscale.cost.kernel import ModelledKernels, load_kernel_model
from prismscale.cost.launch_log import STATED, load_launch_log
from prismscale.validation.steps.golden_rows import GPU, TO_FIT, load_golden_steps

sys.path.insert(0, str(ROOT / "bench"))
from host_needed import host_needed, longer_with_host

LEAST_LONGER = 1.5
"""Times as long as the step becomes with twice the host's time, where the host decides it."""
ROUNDED_TO_NS = 1_000


def main() -> int:
    """Fit, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    given = parser.parse_args()
    records = [r for r in load_golden_steps(given.truth) if r.family == TO_FIT]
    kept = [(r, within / f"{r.name}-steps") for r in records for within in given.runs]
    runs = {
        r: folder
        for r, folder in kept
        if (folder / "results.json").exists() and longer_with_host(folder, 2.0) > LEAST_LONGER
    }
    if not runs:
        print(f"no run of {TO_FIT} that the host decides in {given.runs}", file=sys.stderr)
        return 2
    model = load_kernel_model(GPU)
    found = {r.name: operator_ns(f, host_needed(f, r.step_ms), model) for r, f in runs.items()}
    times_ns = np.array(list(found.values()))
    op_ns = round(float(np.median(times_ns)) / ROUNDED_TO_NS) * ROUNDED_TO_NS
    slower = float(np.quantile(times_ns, 0.9)) / op_ns - 1
    print(f"op_ns = {op_ns:_}  # median of {len(found)}; p90 is {100 * slower:.0f} % slower")
    told = {name: round(ns) for name, ns in sorted(found.items(), key=lambda item: item[1])}
    Path(__file__).with_name("host.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return 0


def operator_ns(folder: Path, factor: float, model: ModelledKernels) -> float:
    """Time of an operator that makes all of the host's work ``factor`` times as long."""
    host = model.profile.host
    log = load_launch_log(min(folder.glob("captures/*/launches-*.parquet")))
    cost_ns = np.array([model.cost(signature).host_ns for signature in log.signatures])
    calls_ns = cost_ns[log.signature_E[log.signature_E != STATED]]
    operators = int((calls_ns >= host.op_ns).sum())
    rest_ns = calls_ns.sum() - operators * host.op_ns
    return float((factor * calls_ns.sum() - rest_ns) / operators)


if __name__ == "__main__":
    sys.exit(main())
