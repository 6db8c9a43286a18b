"""How much slower kernels run while communications hold multiprocessors."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from prismscale.cost.nccl.occupancy import ELSE, PRODUCTS, blocks, slowdown
from prismscale.graph.node import NodeKind

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h100" / "overlap.json"
H100 = 132


@pytest.mark.parametrize(("work", "multiple"), [("mm", PRODUCTS), ("silu", ELSE)])
def test_multiples_are_the_medians_of_what_was_measured(work: str, multiple: float) -> None:
    """Each row says by how much a copy of so many blocks slows a kernel beside it."""
    rows = json.loads(MEASURED.read_text())["figures"]["rows"]
    own = [row for row in rows if row["work"].startswith(work)]
    multiples = [(r["slower"] - 1) * (H100 - r["blocks"]) / r["blocks"] for r in own]
    assert len(own) == 5
    assert multiple == pytest.approx(median(multiples), abs=0.005)


def test_computation_is_as_fast_as_alone_where_nothing_is_held() -> None:
    """And the more is held, and the more of it is products, the slower it is."""
    assert slowdown(0, H100, 1.0) == 1.0
    assert 1.0 < slowdown(16, H100, 0.0) < slowdown(16, H100, 1.0) < slowdown(24, H100, 1.0)


def test_more_than_half_of_the_gpu_is_never_held() -> None:
    """However many communications there are at a time."""
    assert slowdown(66, H100, 0.5) == slowdown(1000, H100, 0.5)


def test_messages_hold_fewer_multiprocessors_on_the_network() -> None:
    """Collectives hold one for each channel."""
    assert blocks(NodeKind.SEND, "h100-sxm", is_near=False) == 2
    assert blocks(NodeKind.RECV, "h100-sxm", is_near=True) == 16
    assert blocks(NodeKind.COLLECTIVE, "a100-80g", is_near=True) == 24
