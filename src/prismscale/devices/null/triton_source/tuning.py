"""Chooses the configuration of a kernel in place of measurements by Triton's autotuner.

On a GPU the autotuner measures every configuration and keeps the fastest. Here each configuration
is traced through the kernel's source instead. The one with the fewest multiplications is taken,
tiles counted whole; among equals, the one with the largest tiles, which read each operand least
often. Everything else that the autotuner does (pruning, keys, hooks, the buffer that flushes the L2
cache) is Triton's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from prismscale.devices.null.libraries.launches import Cost
from prismscale.devices.null.triton_source.kernel_work import Work

FLUSHED_BYTES = 256 << 20
"""Size of the buffer that Triton's ``do_bench`` overwrites before each run to empty the cache."""
STEPS_PER_OCTAVE = 16
"""Resolution at which the work of two configurations is compared: 4 %. Work is extrapolated from a
few programs of the grid, so smaller differences mean nothing."""

Estimate = tuple[float, float]
"""A configuration's work, then minus the area of its tiles. The least estimate is preferred."""
_UNKNOWN: Estimate = (math.inf, 0.0)

_trial: ContextVar[list[Estimate] | None] = ContextVar("trial", default=None)


def replace_measurements(autotuner: Any) -> None:
    """Make ``triton.runtime.autotuner`` compare estimates instead of times."""
    tuner = autotuner.Autotuner
    prune = tuner.prune_configs

    def prune_configs(self: Any, named: dict[str, Any]) -> Any:
        try:
            return prune(self, named)
        except RuntimeError:
            # A performance model may ask the driver, which is not there.
            return self.configs

    tuner.prune_configs = prune_configs
    tuner.do_bench = property(lambda self: estimate)
    # Estimates are of no use to a run on a GPU, and the key of the cache on disk needs a driver.
    tuner.check_disk_cache = lambda self, key, configs, bench: bench()


def estimate(launch: Callable[[], object], quantiles: Sequence[float] = ()) -> Estimate:
    """Estimate one configuration, in place of ``triton.testing.do_bench``.

    Args:
        launch: launches the kernel with the configuration, hooks included.
        quantiles: quantiles of measured times; unused, because nothing is measured.
    """
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    found: list[Estimate] = []
    token = _trial.set(found)
    try:
        launch()
    finally:
        _trial.reset(token)
    return found[0] if found else _UNKNOWN


def is_trial() -> bool:
    """Return whether the launch only serves to compare configurations and must not be recorded."""
    return _trial.get() is not None


def note(work: Work | None) -> None:
    """Pass the work of the launch on trial to :func:`estimate`; None if it is not known."""
    found = _trial.get()
    if found is not None and work is not None:
        found.append(_estimate_of(work.cost))


def _estimate_of(cost: Cost) -> Estimate:
    if cost.kind != "gemm":
        return _rounded(sum(cost.extents)), 0.0
    extents = iter(cost.extents)
    products = list(zip(extents, extents, extents, extents, strict=True))
    work = sum(batch * m * n * k for batch, m, n, k in products)
    tiles = sum(batch * k for batch, _, _, k in products)
    return _rounded(work), -work / tiles


def _rounded(work: int) -> float:
    return round(math.log2(max(work, 1)) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE
