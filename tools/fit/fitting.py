"""What the fits of kernels have in common: where truth is, the minimum, and what they write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TRUTH = ROOT / ".." / "shared" / "truth"
KERNELS = ROOT / "src" / "prismscale" / "cost" / "kernels"
HARNESS = ROOT / "src" / "prismscale" / "validation" / "kernels" / "harness.toml"
EVALUATIONS = 400


def truth_with(part: str, doc: str | None) -> Path | None:
    """The folder of public truth that the command line names; None, with a sentence of why, where
    it has no folder ``part``. ``doc`` describes the command."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0] if doc else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    truth: Path = parser.parse_args().truth
    if (truth / part).is_dir():
        return truth
    print(f"no public truth at {truth}: give it with --truth DIR", file=sys.stderr)
    return None


def minimised(
    loss: Callable[[Sequence[float]], float],
    start: Sequence[float],
    bounds: Sequence[tuple[float, float]],
    *,
    rounds: int = 1,
) -> list[float]:
    """Where ``loss`` is least, by the simplex method from around ``start``; ``rounds`` searches,
    each from where the one before ended."""
    low, high = np.array(bounds, float).T
    values = [float(v) for v in start]
    for _ in range(rounds):
        simplex = np.vstack([values, *(np.array(values) * s for s in 1 + 0.3 * np.eye(len(low)))])
        options = {
            "maxfev": EVALUATIONS,
            "adaptive": True,
            "initial_simplex": np.clip(simplex, low, high),
        }
        found = minimize(loss, values, method="Nelder-Mead", bounds=bounds, options=options)
        values = [float(v) for v in found.x]
    return values


def rounded(value: float) -> float:
    """To the four digits that files of constants have."""
    return float(f"{value:.4g}")


def write_between(path: Path, what: str, text: str) -> None:
    """Put ``text`` between the lines ``# begin fitted WHAT`` and ``# end fitted WHAT``."""
    begin, end = f"# begin fitted {what}\n", f"# end fitted {what}\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(before + begin + text + end + after, encoding="utf-8")


def table_of(constants: Any) -> str:
    """The lines of a table of TOML with the fields of a dataclass."""
    return "".join(f"{k} = {v:.6g}\n" for k, v in asdict(constants).items())


def inline_table_of(constants: Any) -> str:
    """The same as a table in one line."""
    values = ", ".join(f"{k} = {v:.4g}" for k, v in asdict(constants).items())
    return f"{{ {values} }}"


def write_residuals(name: str, found: Mapping[str, Mapping[str, float]]) -> None:
    """Put ``found``, by table and part, into ``NAME.json`` beside this file."""
    path = Path(__file__).with_name(f"{name}.json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def residuals(error_percent: Sequence[float]) -> dict[str, float]:
    """Rows, bias, median and p90 of signed errors in %."""
    size = np.abs(error_percent)
    return {
        "rows": len(size),
        "bias_percent": round(float(np.median(error_percent)), 2),
        "median_percent": round(float(np.median(size)), 2),
        "p90_percent": round(float(np.quantile(size, 0.9)), 2),
    }
