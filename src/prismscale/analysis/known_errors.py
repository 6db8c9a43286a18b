"""How far figures of null runs were from what others measured: ``known_errors.toml``, which
``scripts/generate-docs`` makes of ``bench/results``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from prismscale.cluster import Cluster
from prismscale.typed_files import decode, parse

_FILE = "known_errors.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownError:
    """Of one figure, over runs that others measured."""

    figure: str
    """``allocated``, ``reserved`` or ``step``."""
    gpu: str
    """What cluster presets of it begin with (``h100``); empty: it is no matter of the GPU."""
    cases: int
    median: float
    """Relative, without its sign."""
    worst: float
    benches: tuple[str, ...]
    """In docs/benchmarks.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownErrors:
    known: tuple[KnownError, ...]


@cache
def known_errors() -> tuple[KnownError, ...]:
    """All of them."""
    text = resources.files("prismscale.analysis").joinpath(_FILE).read_text(encoding="utf-8")
    return decode(_KnownErrors, parse(text, _FILE), _FILE).known


def known_error(figure: str, cluster: str) -> KnownError | None:
    """Of a figure on a cluster; None where nobody measured it, and where a step's cluster is no
    preset: its GPU or its links may be another's, whatever it is called."""
    of_figure = (known for known in known_errors() if known.figure == figure)
    of_gpu = (known for known in of_figure if cluster.startswith(known.gpu))
    is_preset = cluster in Cluster.presets()
    return next((known for known in of_gpu if is_preset or not known.gpu), None)
