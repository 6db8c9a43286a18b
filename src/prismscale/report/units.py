"""Formats figures for people: at most four significant digits, and a unit that fits."""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.durations.source import NEVER

_TIMES = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """One unit and one number of decimals for all times of a table."""

    unit: str
    ns: float
    """Nanoseconds in one unit."""
    decimals: int

    @staticmethod
    def of(largest_ns: float) -> Scale:
        """Return the scale that gives ``largest_ns`` four significant digits."""
        unit, ns = _fitting(largest_ns)
        return Scale(unit=unit, ns=ns, decimals=_decimals(largest_ns / ns) if ns > 1 else 0)

    def figure(self, ns: float) -> str:
        """Return ``ns`` in this unit, as a figure without the unit."""
        return f"{ns / self.ns:,.{self.decimals}f}"


def _fitting(ns: float) -> tuple[str, float]:
    return next((t for t in _TIMES if abs(ns) >= t[1]), _TIMES[-1])


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 1000 or size == 0 else 1 if size >= 100 else 2 if size >= 10 else 3


def digits(value: float) -> str:
    """Four significant digits, without an exponent: ``1,234``, ``123.4``, ``1.234``, ``0``."""
    return f"{value:,.{_decimals(value)}f}"


def duration(ns: float) -> str:
    """``412.3 ms``; ``never`` for work that a hang leaves unfinished."""
    if abs(ns) >= NEVER:
        return "never"
    unit, scale = _fitting(ns)
    return f"{ns:,.0f} ns" if unit == "ns" else f"{digits(ns / scale)} {unit}"


def span(low_ns: float, high_ns: float) -> str:
    """``355.5 ms to 452.3 ms``."""
    return f"{duration(low_ns)} to {duration(high_ns)}"


def seconds(value_s: float) -> str:
    """Wall time: ``0.25 s``, ``3.2 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if value_s < 0.995:
        return f"{value_s:.2f} s" if value_s >= 0.005 else "<0.01 s"
    if value_s < 99.95:
        return f"{value_s:.1f} s"
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(n_bytes: float) -> str:
    """``3.417 GiB``."""
    unit, scale = next(((u, s) for u, s in _BYTES if abs(n_bytes) >= s), ("B", 1))
    return f"{n_bytes:,.0f} B" if unit == "B" else f"{digits(n_bytes / scale)} {unit}"


def percent(fraction: float) -> str:
    """``34.2 %``; a small fraction other than 0 becomes ``<0.1 %``, never 0."""
    if 0 < abs(fraction) < 0.0005:
        return "<0.1 %"
    return f"{fraction:.1%}".replace("%", " %")


def signed_percent(fraction: float) -> str:
    """``+1.25 %``."""
    return f"{fraction:+.2%}".replace("%", " %")


def counted(n: int, singular: str, plural: str = "") -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"
