"""Fit norms in 16 bits on public measurements, and say how well they hold.

    python tools/fit/fit_norms.py [--truth DIR]

Writes cuDNN's norms into ``h100-sxm.toml`` (rows of an H200, which has its chip), and cuDNN's and
torch's into ``b200.toml`` (rows of a GB200), between the lines that say so, from the families that
are not held out, to the least mean absolute logarithmic error; residuals go to
``tools/fit/norms.json``. Torch's on an H100 are those of ``fit_calls.py``, which goes first: what
their algorithm reads again is taken from there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from fitting import (
    KERNELS,
    minimised,
    residuals,
    rounded,
    truth_with,
    write_between,
    write_residuals,
)

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_profile import KernelProfile, MemoryRoofline
from prismscale.validation.kernels.memory_rows import MemoryRow, load_memory_rows

CHIPS = {"h200-sxm": "h100-sxm", "gb200": "b200"}
KINDS = {
    "norm forward, torch": "norm",
    "norm backward, torch": "norm_backward",
    "norm forward, cuDNN": "fused_norm",
    "norm backward, cuDNN": "fused_norm_backward",
}
FIELDS = ("efficiency", "base_ns", "row_bytes", "rereads")
START, BOUNDS = (0.7, 3_000.0), ((0.1, 1.0), (500.0, 20_000.0))
CUDNN = ("fused_norm", "fused_norm_backward")
"""These read each row once, and torch's what an H100 showed."""
ROUNDS = 4


def main() -> int:
    """Write the files; exit code 2 where there is no truth."""
    truth = truth_with("cudnn_frontend", __doc__)
    if truth is None:
        return 2
    rows, found = load_memory_rows(truth), {}
    h100 = KernelProfile.load("h100-sxm")
    for measured_on, written_to in CHIPS.items():
        tables = []
        for group, kind in KINDS.items():
            mine = [r for r in rows if r.gpu == measured_on and r.group == group]
            free = [r for r in mine if not r.held_out]
            theirs = h100.memory[kind]
            known = () if kind in CUDNN else (theirs.row_bytes, theirs.rereads)
            is_fitted = kind in CUDNN or written_to != "h100-sxm"
            of_fit, values = "others", [theirs.efficiency, theirs.base_ns]
            if is_fitted:
                loss = partial(_loss, kind, free, known)
                of_fit, values = "fitted", minimised(loss, START, BOUNDS, rounds=ROUNDS)
            roofline = _roofline((*values, *known))
            for part, chosen in ((of_fit, free), ("held out", [r for r in mine if r.held_out])):
                errors = [100 * (_predicted(r, kind, roofline) / r.time_ns - 1) for r in chosen]
                found[f"{measured_on} {group}, {part}"] = residuals(errors)
            if is_fitted:
                lines = "".join(f"{f} = {getattr(roofline, f):.4g}\n" for f in FIELDS)
                tables.append(f"[memory.{kind}]\n{lines}")
        write_between(KERNELS / f"{written_to}.toml", "norms", "\n".join(tables))
    write_residuals("norms", found)
    return 0


@cache
def _profile(gpu: str) -> KernelProfile:
    return KernelProfile.load(gpu)


def _loss(
    kind: str, rows: Sequence[MemoryRow], known: Sequence[float], values: Sequence[float]
) -> float:
    roofline = _roofline((*values, *known))
    return float(np.mean([abs(np.log(_predicted(r, kind, roofline) / r.time_ns)) for r in rows]))


def _roofline(values: Sequence[float]) -> MemoryRoofline:
    return MemoryRoofline(**dict(zip(FIELDS, map(rounded, values), strict=False)))


def _predicted(row: MemoryRow, kind: str, roofline: MemoryRoofline) -> float:
    profile = _profile(row.gpu)
    model = ModelledKernels(profile=replace(profile, memory={**profile.memory, kind: roofline}))
    return float(row.predicted_ns(model))


if __name__ == "__main__":
    sys.exit(main())
