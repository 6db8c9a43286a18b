"""Fit what DeepEP's kernels take of the multiprocessors that a program gives them.

    python tools/fit/fit_deep_ep.py [--truth DIR]

Prints the constants of ``src/prismscale/cost/exchange/exchange_law.py``, and writes residuals into
``tools/fit/deep_ep.json``. Each direction is fitted by itself, by least squares with a soft loss,
to the logarithm of the times of 1,024 tokens and more. Which rows are fitted stands in
``prismscale/validation/communication/exchange_points.py``; ``prismscale validate collectives``
scores the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from fitting import residuals, truth_with, write_residuals
from numpy.typing import NDArray
from scipy.optimize import least_squares

from prismscale.cost.exchange.exchange_law import ExchangeLaw
from prismscale.validation.communication.exchange_errors import TRAINING
from prismscale.validation.communication.exchange_points import ExchangePoint, load_exchanges

START = (2e4, 100.0, 30.0, 30.0)
BOUNDS = ([0, 0, 1, 1], [1e6, 1e3, 1e3, 1e3])
SCALE = (1e4, 100.0, 30.0, 30.0)
SOFT = 0.05


def main() -> int:
    """Fit both directions; returns the exit code."""
    truth = truth_with("aiconfigurator", __doc__)
    if truth is None:
        return 2
    points = [p for p in load_exchanges(truth) if p.is_fitted and p.tokens >= TRAINING]
    found = {}
    for name, combines in (("DISPATCH", False), ("COMBINE", True)):
        chosen = [p for p in points if p.combines == combines]
        law = fit(chosen)
        print(f"{name} = {law}")
        found[name.lower()] = residuals(100 * np.expm1(_errors(_numbers(law), chosen)))
    write_residuals("deep_ep", found)
    return 0


def fit(points: Sequence[ExchangePoint]) -> ExchangeLaw:
    """Return the law of one direction, rounded to what the rows can tell."""
    best = least_squares(
        _errors, START, bounds=BOUNDS, x_scale=SCALE, loss="soft_l1", f_scale=SOFT, args=(points,)
    )
    base_ns, token_ns, moved, own = map(float, best.x)
    return ExchangeLaw(
        base_ns=round(base_ns, -1),
        token_ns=round(token_ns, 1),
        moved_bytes_per_ns=round(moved, 1),
        own_bytes_per_ns=round(own, 2),
    )


def _numbers(law: ExchangeLaw) -> tuple[float, ...]:
    return law.base_ns, law.token_ns, law.moved_bytes_per_ns, law.own_bytes_per_ns


def _errors(numbers: Sequence[float], points: Sequence[ExchangePoint]) -> NDArray[np.float64]:
    """Return the logarithms of predicted over measured times."""
    base_ns, token_ns, moved, own = numbers
    law = ExchangeLaw(
        base_ns=base_ns, token_ns=token_ns, moved_bytes_per_ns=moved, own_bytes_per_ns=own
    )
    predicted = [p.kernel_ns(law) for p in points]
    return np.log(np.array(predicted) / np.array([p.time_ns for p in points]))


if __name__ == "__main__":
    sys.exit(main())
