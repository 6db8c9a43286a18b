"""Measuring gloo on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.cluster import Cluster
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.measure.collectives import measure_collectives


def test_measurement_writes_a_cluster_that_loads(tmp_path: Path) -> None:
    """Two real processes, two sizes: every operation has a curve and progress ends near one."""
    out, seen = tmp_path / "here.toml", list[float]()

    cluster = measure_collectives(
        world_size=2, sizes=[4096, 64], out=out, seconds=0.2, date="2025-01-01",
        progress=lambda _, fraction: seen.append(fraction),
    )  # fmt: skip

    assert Cluster.load(out) == cluster
    assert cluster.measured is not None
    sizes = {c.op: c.n_bytes for c in cluster.measured.curves}
    assert sizes[CollectiveOp.ALL_TO_ALL] == (64, 4096)
    assert sizes[CollectiveOp.BARRIER] == (1,)
    assert len(sizes) == 7
    assert seen == sorted(seen)


def test_sizes_that_round_up_to_the_same_are_measured_once(tmp_path: Path) -> None:
    """Two ranks carry whole items for both: 1 and 8 bytes are one message of 8."""
    seen = list[str]()

    cluster = measure_collectives(
        world_size=2, sizes=[1, 8], out=tmp_path / "here.toml", seconds=0.1,
        progress=lambda what, _: seen.append(what),
    )  # fmt: skip

    assert cluster.measured is not None
    assert {c.n_bytes for c in cluster.measured.curves if c.op != CollectiveOp.BARRIER} == {(8,)}
    assert {what.split()[1] for what in seen if "barrier" not in what} == {"8"}


def test_one_process_has_nothing_to_measure(tmp_path: Path) -> None:
    """Refused before any process starts."""
    with pytest.raises(UsageError, match="2 processes or more"):
        measure_collectives(world_size=1, sizes=[64], out=tmp_path / "x.toml")


@pytest.mark.parametrize("sizes", [[], [0]])
def test_sizes_must_be_positive(tmp_path: Path, sizes: list[int]) -> None:
    """Refused before any process starts."""
    with pytest.raises(UsageError, match="at least 1 byte"):
        measure_collectives(world_size=2, sizes=sizes, out=tmp_path / "x.toml")
