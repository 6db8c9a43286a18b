"""Compares what kernels lose beside communications with what others published of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prismscale.cluster import Cluster
from prismscale.cost.nccl.occupancy import blocks, slowdown
from prismscale.cost.target_gpu import profile_of
from prismscale.graph.node import NodeKind
from prismscale.validation.rows import Row

OTHERS = "NVIDIA/nccl issue 1428"
"""Times of kernels of a GPT's training on A100, alone and beside an all-gather."""
COPY_ENGINES = "pytorch pull request 179937"
"""Products are 30 to 40 % slower beside the collectives of an 8B model's training on 8 H100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A kernel beside a collective."""

    what: str
    gpu: str
    times: float
    """How many times as long as alone it takes, as published."""
    product_share: float
    source: str

    @property
    def predicted(self) -> float:
        """How many times as long as alone the law says that it takes."""
        held = blocks(NodeKind.COLLECTIVE, self.gpu, is_near=True)
        multiprocessors = profile_of(Cluster.load(self.gpu).device).multiprocessors
        return slowdown(held, multiprocessors, self.product_share)


PUBLISHED = (
    Beside(what="products", gpu="a100-80g", times=2.08 / 1.18, product_share=1.0, source=OTHERS),
    Beside(what="attention", gpu="a100-80g", times=0.33 / 0.18, product_share=0.0, source=OTHERS),
    Beside(what="elementwise", gpu="a100-80g", times=0.05 / 0.02, product_share=0.0, source=OTHERS),
    Beside(what="products", gpu="h100-sxm", times=1.35, product_share=1.0, source=COPY_ENGINES),
)


def overlap_rows() -> Iterator[Row]:
    """Yield how far each prediction is off; none has a bar, because they are so few."""
    for b in PUBLISHED:
        name = (
            f"held out: {b.gpu}, {b.what} beside a collective, {b.predicted:.2f} times as long "
            f"as alone, published {b.times:.2f} ({b.source}), off by"
        )
        yield Row.told(name, 100 * (b.predicted / b.times - 1), "%")
