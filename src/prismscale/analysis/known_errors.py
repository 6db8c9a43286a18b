"""Errors of null runs against measurements by others.

``scripts/generate-docs`` makes ``known_errors.toml`` from ``bench/results``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from prismscale.cluster import Cluster
from prismscale.typed_files import decode, parse

_FILE = "known_errors.toml"
HOST_BOUND = "host-bound step"
"""Step of a program whose device waits for its host most of the time."""
MOSTLY = 0.5
"""Share of such waiting from which a step counts as host-bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownError:
    """Error of one figure, over runs that others measured."""

    figure: str
    """``allocated``, ``reserved``, ``step`` or :data:`HOST_BOUND`."""
    gpu: str
    """Prefix of the names of its cluster presets (``h100``); empty: the GPU does not matter."""
    cases: int
    median: float
    """Relative, absolute value."""
    worst: float
    benches: tuple[str, ...]
    """Benchmarks in docs/benchmarks.md that it comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownErrors:
    known: tuple[KnownError, ...]


@cache
def known_errors() -> tuple[KnownError, ...]:
    """Read all known errors."""
    text = resources.files("prismscale.analysis").joinpath(_FILE).read_text(encoding="utf-8")
    return decode(_KnownErrors, parse(text, _FILE), _FILE).known


def known_error(figure: str, cluster: str) -> KnownError | None:
    """Return the error of a figure on a cluster; None where it was not measured.

    Errors that depend on the GPU are known for cluster presets only. Any other cluster may have
    another GPU or other links, whatever its name.
    """
    of_figure = (known for known in known_errors() if known.figure == figure)
    of_gpu = (known for known in of_figure if cluster.startswith(known.gpu))
    is_preset = cluster in Cluster.presets()
    return next((known for known in of_gpu if is_preset or not known.gpu), None)


def known_step_error(waiting: float, cluster: str) -> KnownError | None:
    """Return the error of steps of a kind; that of any step where those of the kind are unknown.

    Args:
        waiting: share of the step in which the device waits for the host.
        cluster: as for :func:`known_error`.
    """
    host_bound = known_error(HOST_BOUND, cluster) if waiting > MOSTLY else None
    return host_bound or known_error("step", cluster)
