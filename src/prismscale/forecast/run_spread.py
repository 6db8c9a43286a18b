"""What differs between runs, and what between the steps of one.

A run keeps its devices and links; another run of the same job gets others. Who looks at a log sees
the steps of one run; who plans looks at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.forecast.draws.montecarlo import Draws

SPREAD = (0.5, 0.95)
"""Quantiles whose distance is shared out among sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpread:
    """Coefficients of variation of the step."""

    within_cv: float
    """From step to step of one run."""
    between_cv: float
    """Of the mean step, from run to run."""
    within_p95: float
    """How far the p95 of the steps of one run lies above their median, as a share."""

    @classmethod
    def of(cls, step_ns_AT: NDArray[np.int64]) -> RunSpread:
        """From drawn runs (A) of several steps (T) each."""
        steps = step_ns_AT.shape[1]
        mean = float(step_ns_AT.mean())
        within = float(step_ns_AT.var(axis=1, ddof=1).mean())
        between = max(float(step_ns_AT.mean(axis=1).var(ddof=1)) - within / steps, 0.0)
        # Steps around their run's mean, which takes a share of their own deviation with it.
        off_AT = step_ns_AT - step_ns_AT.mean(axis=1, keepdims=True)
        around = mean + off_AT * np.sqrt(steps / (steps - 1))
        middle, far = np.quantile(around, SPREAD)
        return cls(
            within_cv=float(np.sqrt(within)) / mean,
            between_cv=float(np.sqrt(between)) / mean,
            within_p95=float(far / middle - 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VariationShare:
    """What one source of variation does to a forecast."""

    name: str
    share: float
    """Of p95 - p50: 1 minus the square of what is left of it without the source. Independent
    sources add up in squares, so that shares add up to about 1."""
    p50_ns: float
    """Of the step without it."""


def variation_shares(
    draw: Callable[[str | None], Draws], names: Sequence[str]
) -> tuple[VariationShare, ...]:
    """The share of every source, from the same draws without it.

    Args:
        draw: draws without the source of this name; None: with all of them.
    """
    p50, p95 = np.quantile(draw(None).step_ns_D, SPREAD)
    found = []
    for name in names:
        own_p50, own_p95 = np.quantile(draw(name).step_ns_D, SPREAD)
        share = 1 - ((own_p95 - own_p50) / (p95 - p50)) ** 2 if p95 > p50 else 0.0
        found.append(VariationShare(name=name, share=float(share), p50_ns=float(own_p50)))
    return tuple(found)
