"""Compares exchanges of tokens (DeepEP, HybridEP) with public measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.cost.exchange.exchange_law import law_of
from prismscale.graph.node import CollectiveOp
from prismscale.validation.communication.exchange_points import (
    DEEP_EP,
    HYBRID_EP,
    PRESETS,
    ExchangePoint,
    load_exchanges,
)
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.rows import Row

TRAINING = 1024
"""Fewest tokens of a rank that training has; fewer are of inference."""
USUAL = 16
"""Fewest multiprocessors that a training program gives HybridEP."""


@dataclass(frozen=True, kw_only=True)
class _Exchanges:
    """Points that are summed up together."""

    name: str
    belongs: Callable[[ExchangePoint], bool]


def exchange_rows(truth: Path) -> Iterator[Row]:
    """Yield all rows; none has a bar, because none was set before the points were seen.

    Raises:
        FormatError: measurements are missing or damaged.
    """
    points = load_exchanges(truth)
    models = {g: AnalyticCollectiveModel(Cluster.load(name)) for g, name in PRESETS.items()}
    for family in FAMILIES:
        chosen = [p for p in points if family.belongs(p)]
        errors = [100 * (predicted_ns(p, models) / p.time_ns - 1) for p in chosen]
        if chosen:
            yield from error_rows(family.name, errors, Bars(), of="points")


def predicted_ns(point: ExchangePoint, models: Mapping[str, AnalyticCollectiveModel]) -> float:
    """Return the time that the null device gives the exchange.

    The communication and DeepEP's kernel run beside each other.
    """
    n_bytes = point.layout.exchanged * point.row_bytes
    links_ns = models[point.gpu].time_ns(CollectiveOp.ALL_TO_ALL, n_bytes, point.footprint)
    if point.library != DEEP_EP:
        return links_ns
    return max(links_ns, point.kernel_ns(law_of(combines=point.combines)))


def _measured(gpu: str, *, combines: bool, fitted: bool) -> Callable[[ExchangePoint], bool]:
    def belongs(p: ExchangePoint) -> bool:
        is_kind = (p.gpu, p.combines, p.is_fitted) == (gpu, combines, fitted)
        return is_kind and not p.is_published and p.tokens >= TRAINING

    return belongs


def _published(library: str, gpu: str, *, usual: bool = True) -> Callable[[ExchangePoint], bool]:
    def belongs(p: ExchangePoint) -> bool:
        is_usual = p.library == DEEP_EP or p.multiprocessors >= USUAL
        return (p.is_published, p.library, p.gpu, is_usual) == (True, library, gpu, usual)

    return belongs


FAMILIES = (
    *(
        _Exchanges(
            name=f"{'fitted' if fitted else 'held out'}: DeepEP on 8 {gpu.upper()}, {direction}",
            belongs=_measured(gpu, combines=direction == "combine", fitted=fitted),
        )
        for gpu, fitted in (("b200", False), ("h100", False), ("h100", True))
        for direction in ("dispatch", "combine")
    ),
    _Exchanges(name="held out: DeepEP on 8 B200, README", belongs=_published(DEEP_EP, "b200")),
    _Exchanges(
        name="held out: DeepEP on 8 to 24 GB200, README", belongs=_published(DEEP_EP, "gb200")
    ),
    _Exchanges(
        name="held out: HybridEP on 16 to 64 H100, 16 multiprocessors",
        belongs=_published(HYBRID_EP, "h100"),
    ),
    _Exchanges(
        name="held out: HybridEP on 16 to 64 H100, 4 and 8 multiprocessors",
        belongs=_published(HYBRID_EP, "h100", usual=False),
    ),
    _Exchanges(name="held out: HybridEP on 8 B200", belongs=_published(HYBRID_EP, "b200")),
    _Exchanges(name="held out: HybridEP on 8 to 36 GB200", belongs=_published(HYBRID_EP, "gb200")),
    _Exchanges(
        name="held out: DeepEP on 8 GPUs, fewer than 1,024 tokens",
        belongs=lambda p: not p.is_published and p.tokens < TRAINING and not p.is_fitted,
    ),
)
