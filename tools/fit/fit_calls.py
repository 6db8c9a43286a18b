"""Fit kernels that wait for memory on calls that were measured on an H100, and say how well they
hold.

    python tools/fit/fit_calls.py

Reads ``bench/results/h100/kernels_of_shapes.json``: calls of ``bench/gpu/shapes.py`` and of large
models, one by one, as ``prismscale profile-kernels`` times them. No call of a program that is
scored is among them; those lie in ``kernels_of_programs.json`` beside, and nothing is fitted on
them. Writes the level-2 cache and the kinds below into ``h100-sxm.toml`` between the lines that say
so, each kind by itself to the least mean absolute logarithmic error, and residuals of fitted and of
programs' calls into ``tools/fit/calls.json``.

Left out: dropout, whose probability a signature does not hold (it was measured with 1, which writes
zeros); sorts, of which there are too few.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from fitting import KERNELS, ROOT, minimised, residuals, rounded, write_between, write_residuals

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_measured import KernelTable
from prismscale.cost.kernel_profile import Cache, KernelProfile, MemoryRoofline
from prismscale.cost.kernel_signature import KernelCall, parse_signature

GPU = "h100-sxm"
MEASURED = ROOT / "bench" / "results" / "h100"
CACHE_BYTES = 50e6
"""Of the data sheet."""
CACHED = ("pointwise", "copy", "fill")
"""Kinds by which the cache's speed is found: large calls of them are bound by nothing else."""
SPEEDS = np.arange(1.0, 4.0, 0.25)
LIMITS: Mapping[str, tuple[float, tuple[float, float]]] = {
    "efficiency": (0.8, (0.05, 1.0)),
    "base_ns": (2_500.0, (500.0, 60_000.0)),
    "row_bytes": (1_000.0, (0.0, 30_000.0)),
    "rereads": (0.5, (0.0, 2.0)),
    "elements_per_s": (4e11, (5e10, 4e12)),
    "transposed": (0.4, (0.05, 1.0)),
    "accumulating": (0.3, (0.02, 1.0)),
}
"""Where the search begins, and how far it may go."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "pointwise": ("efficiency", "base_ns", "elements_per_s"),
    "broadcast": ("efficiency", "base_ns", "elements_per_s"),
    "copy": ("efficiency", "base_ns", "elements_per_s"),
    "strided_copy": ("efficiency", "base_ns", "elements_per_s", "transposed"),
    "fill": ("efficiency", "base_ns"),
    "reduction": ("efficiency", "base_ns"),
    "loss": ("efficiency", "base_ns", "row_bytes"),
    "long_softmax": ("efficiency",),
    "softmax_backward": ("efficiency",),
    "norm": ("efficiency", "base_ns", "row_bytes", "rereads"),
    "norm_backward": ("efficiency", "base_ns", "row_bytes", "rereads"),
    "embedding_backward": ("efficiency", "base_ns"),
    "index": ("efficiency", "base_ns", "accumulating"),
    "scan": ("base_ns",),
    "foreach": ("efficiency", "base_ns"),
    "foreach_reduction": ("efficiency", "base_ns"),
    "optimizer": ("efficiency",),
}
FIXED: Mapping[str, Mapping[str, float]] = {
    "long_softmax": {"base_ns": 4_000},
    "softmax_backward": {"base_ns": 4_000},
    "optimizer": {"base_ns": 4_000},
    "embedding_backward": {"launches": 5},
    "scan": {"efficiency": 0.5, "passes": 2},
}
"""What is not looked for: all calls are too long, or too short, to say."""
_UNKNOWN = MemoryRoofline(efficiency=float("inf"), base_ns=-1.0)
"""Both are always told; the other fields where they are not as usual."""
ROUNDS = 4
Calls = Mapping[str, Sequence[tuple[KernelCall, float]]]


def main() -> int:
    """Write the files; exit code 2 where there are no measurements."""
    if not MEASURED.is_dir():
        print(f"no measurements at {MEASURED}", file=sys.stderr)
        return 2
    fitted, held_out = (
        calls_of(MEASURED / f"kernels_of_{part}.json") for part in ("shapes", "programs")
    )
    profile = with_cache(KernelProfile.load(GPU), fitted)
    for kind in FIELDS:
        if kind not in CACHED:
            profile = fit(profile, kind, fitted[kind])
        print(kind, profile.memory[kind], flush=True)
    profile = _with_transposed_broadcasts(profile)
    write_between(KERNELS / f"{GPU}.toml", "calls", "\n".join(_tables(profile)))
    write_residuals("calls", dict(_residuals(profile, fitted, held_out)))
    return 0


def calls_of(path: Path) -> Calls:
    """Measured calls of a table, and their nanoseconds, by kind."""
    found = defaultdict(list)
    for kernel in KernelTable.load(path).kernels:
        call = parse_signature(kernel.signature)
        if kernel.device_ns:
            found[kind_of(call)].append((call, float(kernel.device_ns)))
    return found


def with_cache(profile: KernelProfile, calls: Calls) -> KernelProfile:
    """``profile`` with the cache's speed at which the kinds of ``CACHED`` fit best together, and
    these kinds as they fit then."""

    def trial(speed: float) -> tuple[float, KernelProfile]:
        cached = replace(profile, cache=Cache(bytes=CACHE_BYTES, speed=round(speed, 2)))
        for kind in CACHED:
            cached = fit(cached, kind, calls[kind])
        return sum(loss(cached, calls[kind]) * len(calls[kind]) for kind in CACHED), cached

    return min((trial(float(speed)) for speed in SPEEDS), key=lambda found: found[0])[1]


def fit(
    profile: KernelProfile, kind: str, calls: Sequence[tuple[KernelCall, float]]
) -> KernelProfile:
    """``profile`` with the roofline of ``kind`` that fits ``calls`` best."""
    start, bounds = zip(*(LIMITS[name] for name in FIELDS[kind]), strict=True)
    values = minimised(lambda x: loss(_with(profile, kind, x), calls), start, bounds, rounds=ROUNDS)
    return _with(profile, kind, values)


def loss(profile: KernelProfile, calls: Iterable[tuple[KernelCall, float]]) -> float:
    """Mean absolute logarithm of predicted over measured."""
    return float(np.mean(np.abs(np.log([1 + e for e in errors(profile, calls)]))))


def errors(profile: KernelProfile, calls: Iterable[tuple[KernelCall, float]]) -> list[float]:
    """Predicted over measured, less one."""
    model = ModelledKernels(profile=profile)
    return [max(model.cost_of_call(call).device_ns, 1) / ns - 1 for call, ns in calls]


def _with(profile: KernelProfile, kind: str, values: Sequence[float]) -> KernelProfile:
    found = dict(zip(FIELDS[kind], map(rounded, values), strict=True))
    roofline = replace(_UNKNOWN, **FIXED.get(kind, {}), **found)
    return replace(profile, memory={**profile.memory, kind: roofline})


def _with_transposed_broadcasts(profile: KernelProfile) -> KernelProfile:
    """No broadcast of transposed operands was measured: they are as slow as such copies."""
    copies, broadcasts = profile.memory["strided_copy"], profile.memory["broadcast"]
    share = copies.efficiency * copies.transposed / broadcasts.efficiency
    found = replace(broadcasts, transposed=rounded(share))
    return replace(profile, memory={**profile.memory, "broadcast": found})


def _tables(profile: KernelProfile) -> Iterable[str]:
    if profile.cache:
        yield f"[cache]\nbytes = {profile.cache.bytes:.4g}\nspeed = {profile.cache.speed:.4g}\n"
    for kind in FIELDS:
        found = asdict(profile.memory[kind])
        lines = (f"{f} = {v:.4g}\n" for f, v in found.items() if v != getattr(_UNKNOWN, f))
        yield f"[memory.{kind}]\n{''.join(lines)}"


def _residuals(
    profile: KernelProfile, fitted: Calls, held_out: Calls
) -> Iterable[tuple[str, dict[str, float]]]:
    for kind in FIELDS:
        for part, calls in (("fitted", fitted[kind]), ("programs", held_out[kind])):
            if calls:
                yield f"{kind}, {part}", residuals([100 * e for e in errors(profile, calls)])


if __name__ == "__main__":
    sys.exit(main())
