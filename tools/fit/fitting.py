"""What the fits of kernels have in common: the minimum, and tables between two lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

EVALUATIONS = 400


def minimised(
    loss: Callable[[Sequence[float]], float],
    start: Sequence[float],
    bounds: Sequence[tuple[float, float]],
) -> list[float]:
    """Where ``loss`` is least, by the simplex method from around ``start``."""
    simplex = np.vstack([start, *(np.array(start) * s for s in 1 + 0.3 * np.eye(len(start)))])
    low, high = np.array(bounds, float).T
    options = {
        "maxfev": EVALUATIONS,
        "adaptive": True,
        "initial_simplex": np.clip(simplex, low, high),
    }
    found = minimize(loss, start, method="Nelder-Mead", bounds=bounds, options=options)
    return [float(v) for v in found.x]


def write_between(path: Path, what: str, text: str) -> None:
    """Put ``text`` between the lines ``# begin fitted WHAT`` and ``# end fitted WHAT``."""
    begin, end = f"# begin fitted {what}\n", f"# end fitted {what}\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(before + begin + text + end + after, encoding="utf-8")


def residuals(error_percent: Sequence[float]) -> dict[str, float]:
    """Rows, bias, median and p90 of signed errors in %."""
    size = np.abs(error_percent)
    return {
        "rows": len(size),
        "bias_percent": round(float(np.median(error_percent)), 2),
        "median_percent": round(float(np.median(size)), 2),
        "p90_percent": round(float(np.quantile(size, 0.9)), 2),
    }
