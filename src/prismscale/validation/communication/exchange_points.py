"""Public measurements of exchanges of tokens by libraries' own kernels: DeepEP and HybridEP.

Rows of aiconfigurator (Apache-2.0) are of DeepEP on 8 GPUs of one node, with 8-bit tokens there and
16-bit sums back. The rows below are from the README of HybridEP (deepseek-ai/DeepEP, branch
hybrid-ep at 94a9f8f, docs/README_Hybrid-EP.md, MIT): bandwidths for 4,096 tokens of 7,168 elements,
8 experts a token and 8 on each rank, routed evenly. HybridEP's are those of kernels alone, DeepEP's
those of torch's calls. On several nodes bytes count once for each node, the rank's own too.

[Note: held out exchanges] Constants are fitted to rows of 8 H100 with at most 12 multiprocessors.
All others are held out.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from prismscale.cost.exchange.exchange_law import ExchangeLaw
from prismscale.cost.exchange.token_layout import TokenLayout
from prismscale.cost.topology import TopologyFootprint
from prismscale.errors import FormatError
from prismscale.validation.communication.collective_points import even_footprint

DEEP_EP, HYBRID_EP = "DeepEP", "HybridEP"
FITTED_GPU, MOST_FITTED = "h100", 12
PRESETS = {"h100": "h100-sxm", "b200": "b200", "gb200": "gb200"}
_NODE, _DOMAIN = 8, 72
_GPUS = {"h100_sxm": "h100", "b200_sxm": "b200"}
_TABLES = "aiconfigurator/*__wideep_deepep_normal_perf__*.csv.gz"
_TOKENS, _HIDDEN, _TOPK, _LOCAL_EXPERTS = 4096, 7168, 8, 8
_README = (
    # library, GPU, ranks, multiprocessors; GB/s of an 8-bit dispatch, a 16-bit one, a combine
    (HYBRID_EP, "h100", 16, 4, 34.00, 44.40, 52.00),
    (HYBRID_EP, "h100", 16, 8, 62.00, 76.80, 68.00),
    (HYBRID_EP, "h100", 16, 16, 68.48, 71.71, 62.95),
    (HYBRID_EP, "h100", 32, 4, 38.50, 52.60, 51.00),
    (HYBRID_EP, "h100", 32, 8, 51.30, 54.50, 56.40),
    (HYBRID_EP, "h100", 32, 16, 55.35, 57.69, 57.46),
    (HYBRID_EP, "h100", 64, 4, 37.50, 48.00, 46.00),
    (HYBRID_EP, "h100", 64, 8, 46.63, 50.55, 51.03),
    (HYBRID_EP, "h100", 64, 16, 46.52, 49.97, 49.77),
    (HYBRID_EP, "b200", 8, 16, 599.27, 734.95, 673.84),
    (HYBRID_EP, "gb200", 8, 16, 620.98, 750.15, 684.27),
    (HYBRID_EP, "gb200", 8, 32, 713.98, 764.03, 737.13),
    (HYBRID_EP, "gb200", 16, 16, 577.17, 661.93, 600.75),
    (HYBRID_EP, "gb200", 16, 32, 650.48, 706.95, 666.26),
    (HYBRID_EP, "gb200", 24, 16, 360.12, 637.80, 565.53),
    (HYBRID_EP, "gb200", 24, 32, 577.96, 665.97, 639.80),
    (HYBRID_EP, "gb200", 32, 16, 286.93, 629.79, 547.25),
    (HYBRID_EP, "gb200", 32, 32, 538.86, 642.23, 605.15),
    (HYBRID_EP, "gb200", 36, 16, 260.53, 612.85, 543.27),
    (HYBRID_EP, "gb200", 36, 32, 489.27, 632.31, 596.99),
    (DEEP_EP, "b200", 8, 16, 246.0, 348.0, 302.0),
    (DEEP_EP, "b200", 8, 24, 349.0, 494.0, 420.0),
    (DEEP_EP, "b200", 8, 32, 443.0, 619.0, 524.0),
    (DEEP_EP, "b200", 8, 40, 519.0, 629.0, 570.0),
    (DEEP_EP, "b200", 8, 48, 554.0, 646.0, 586.0),
    (DEEP_EP, "gb200", 8, 16, 248.86, 362.01, 310.21),
    (DEEP_EP, "gb200", 8, 24, 350.97, 512.72, 425.95),
    (DEEP_EP, "gb200", 8, 32, 447.76, 615.78, 519.57),
    (DEEP_EP, "gb200", 16, 16, 242.51, 328.80, 278.34),
    (DEEP_EP, "gb200", 16, 24, 338.87, 442.47, 378.32),
    (DEEP_EP, "gb200", 16, 32, 393.72, 520.76, 442.51),
    (DEEP_EP, "gb200", 24, 16, 258.33, 324.64, 126.53),
    (DEEP_EP, "gb200", 24, 24, 351.05, 450.22, 163.62),
    (DEEP_EP, "gb200", 24, 32, 405.04, 502.84, 207.10),
)


@dataclass(frozen=True, kw_only=True)
class ExchangePoint:
    """One measured exchange of a rank's tokens."""

    library: str
    gpu: str
    """Key of :data:`PRESETS`."""
    ranks: int
    tokens: int
    """Tokens of a rank."""
    topk: int
    experts: int
    row_bytes: int
    """Bytes of a token with its scales."""
    multiprocessors: int
    combines: bool
    """Whether tokens come back and are summed up."""
    is_published: bool = False
    """Whether it is from the README."""
    time_ns: float

    @cached_property
    def layout(self) -> TokenLayout:
        """Layout of the tokens of rank 0, which are spread evenly over experts."""
        peers = min(self.ranks, _DOMAIN if self.gpu == "gb200" else _NODE)
        return TokenLayout(
            tokens=self.tokens,
            topk=self.topk,
            counts=(1,) * self.experts,
            ranks=self.ranks,
            rank=0,
            peers=peers,
        )

    @property
    def footprint(self) -> TopologyFootprint:
        """Footprint of the group, which is spread evenly over its nodes."""
        return even_footprint(self.ranks, len(self.layout.to_node))

    def kernel_ns(self, law: ExchangeLaw) -> float:
        """Return the time that ``law`` gives the kernel."""
        return law.time_ns(
            moved=self.layout.received,
            own=self.tokens,
            row_bytes=self.row_bytes,
            multiprocessors=self.multiprocessors,
        )

    @property
    def is_fitted(self) -> bool:
        """Whether a constant was fitted to it; see [Note: held out exchanges]."""
        is_few = self.gpu == FITTED_GPU and self.multiprocessors <= MOST_FITTED
        return is_few and self.library == DEEP_EP and not self.is_published


def load_exchanges(truth: Path) -> list[ExchangePoint]:
    """Load all measured exchanges, from below ``truth`` and from the README.

    Raises:
        FormatError: a file is damaged.
    """
    try:
        measured = [p for path in sorted(truth.glob(_TABLES)) for p in _aiconfigurator(path)]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise FormatError(f"measurements of exchanges below {truth}: {error!r}") from error
    return [*measured, *_published()]


def _aiconfigurator(path: Path) -> Iterator[ExchangePoint]:
    gpu = _GPUS[path.name.partition("__")[0]]
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            hidden = int(row["hidden_size"])
            for direction, row_bytes in (
                ("dispatch", _eight_bits(hidden)),
                ("combine", 2 * hidden),
            ):
                yield ExchangePoint(
                    library=DEEP_EP,
                    gpu=gpu,
                    ranks=_NODE * int(row["node_num"]),
                    tokens=int(row["num_token"]),
                    topk=int(row["num_topk"]),
                    experts=int(row["num_experts"]),
                    row_bytes=row_bytes,
                    multiprocessors=int(row[f"{direction}_sms"]),
                    combines=direction == "combine",
                    time_ns=1e3 * float(row[f"{direction}_transmit_us"]),
                )


def _published() -> Iterator[ExchangePoint]:
    rows_bytes = (_eight_bits(_HIDDEN), 2 * _HIDDEN, 2 * _HIDDEN)
    for library, gpu, ranks, multiprocessors, *bandwidths in _README:
        for i, (row_bytes, bandwidth) in enumerate(zip(rows_bytes, bandwidths, strict=True)):
            point = ExchangePoint(
                library=library,
                gpu=gpu,
                ranks=ranks,
                tokens=_TOKENS,
                topk=_TOPK,
                experts=_LOCAL_EXPERTS * ranks,
                row_bytes=row_bytes,
                multiprocessors=multiprocessors,
                combines=i == len(rows_bytes) - 1,
                is_published=True,
                time_ns=0.0,
            )
            layout = point.layout
            counted = layout.received if len(layout.to_node) == 1 else sum(layout.to_node)
            yield replace(point, time_ns=counted * row_bytes / bandwidth)


def _eight_bits(hidden: int) -> int:
    """Return the bytes of a token of 8-bit elements, with a scale of 4 bytes for each 128."""
    return hidden + hidden // 128 * 4
