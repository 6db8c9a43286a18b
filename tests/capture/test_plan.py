"""Which ranks are captured, and for whom they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.capture.plan import CapturePlan, CapturePlanner, find_axes
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from support.jobs import mesh_groups
from support.traces import loop_trace

Kind = Callable[[Sequence[int]], int]
"""Which program a rank runs, by its coordinates."""


class Job:
    """A mesh of ranks whose programs differ as ``kind`` says."""

    def __init__(
        self, shape: Sequence[int], kind: Kind, names: str = "pdt", *, sends: bool = False
    ) -> None:
        self.mesh = np.arange(int(np.prod(shape))).reshape(shape)
        axes = {name: axis for axis, name in enumerate(names[: len(shape)])}
        self.groups = mesh_groups(self.mesh, axes)
        self.kind, self.traces = kind, dict[int, RankTrace]()
        self.sends = sends
        self.batches: list[list[int]] = []

    def coordinates(self, rank: int) -> list[int]:
        """Place on the mesh."""
        return [int(c) for c in np.unravel_index(rank, self.mesh.shape)]

    def capture(self, ranks: Sequence[int]) -> None:
        """Add the traces of ranks."""
        self.batches.append(list(ranks))
        for rank in ranks:
            calls = [(CollectiveOp.ALL_REDUCE, 4 + self.kind(self.coordinates(rank)), 0)]
            if self.sends:
                stages = next(
                    group_index
                    for group_index, group in enumerate(g for g in self.groups if rank in g.ranks)
                    if group.name == "p"
                )
                calls.append((CollectiveOp.SEND, 4, stages))
            self.traces[rank] = loop_trace(
                self.mesh.size, 0, rank=rank, body=calls, groups=self.groups
            )

    def plan(self, max_captures: int = 128, *, quick: bool = False) -> CapturePlan:
        """Capture what is needed."""
        return CapturePlanner(
            traces=self.traces,
            capture=self.capture,
            world_size=self.mesh.size,
            max_captures=max_captures,
            quick=quick,
        ).plan()

    def misjudged(self, plan: CapturePlan) -> list[int]:
        """Ranks that another program stands for."""
        kinds = [self.kind(self.coordinates(r)) for r in range(self.mesh.size)]
        return [r for r, by in enumerate(plan.representative_R.tolist()) if kinds[r] != kinds[by]]


def test_axes_are_read_off_the_groups() -> None:
    """Sizes and positions of a three-dimensional mesh."""
    job = Job((2, 3, 4), lambda c: 0)
    job.capture([0])
    axes = {a.name: a for a in find_axes(job.traces[0])}
    assert {n: a.size for n, a in axes.items()} == {"p": 2, "d": 3, "t": 4}
    for index, name in enumerate("pdt"):
        expected = [job.coordinates(r)[index] for r in range(24)]
        assert axes[name].position_R.tolist() == expected


def test_a_flattened_group_adds_no_axis() -> None:
    """dp × tp is nothing new beside dp and tp."""
    job = Job((2, 2, 2), lambda c: 0)
    flat = [
        GroupRecord(ranks=tuple(g), name="flat", backend="nccl") for g in job.mesh.reshape(2, 4)
    ]
    job.groups += tuple(flat)
    job.capture([0])
    assert sorted(a.name for a in find_axes(job.traces[0])) == ["d", "p", "t"]


def test_a_world_without_groups_is_one_axis() -> None:
    """Plain data parallelism: first, second, middle and last rank are looked at."""
    job = Job((64,), lambda c: 0, names="")
    plan = job.plan()
    assert sorted(job.traces) == [0, 1, 32, 63]
    assert plan.witnesses == (1, 32, 63)
    assert set(plan.representative_R.tolist()) == {0}


def test_one_rank_alone_is_captured() -> None:
    """The smallest world."""
    plan = Job((1,), lambda c: 0, names="").plan()
    assert plan.representative_R.tolist() == [0]


@pytest.mark.parametrize("border", [1, 5, 31, 32, 63])
def test_a_border_is_found_wherever_it_lies(border: int) -> None:
    """By halving: a few captures more, not all of them."""
    job = Job((64, 2), lambda c: int(c[0] >= border))
    plan = job.plan()
    assert job.misjudged(plan) == []
    assert plan.distinct == ("p",)
    assert len(job.traces) <= 16


def test_every_stage_of_a_pipeline_is_captured() -> None:
    """Where each differs from its neighbour, and only once for all replicas."""
    job = Job((8, 16, 8), lambda c: c[0])
    plan = job.plan()
    assert job.misjudged(plan) == []
    assert len(set(plan.representative_R.tolist())) == 8
    assert len(job.traces) <= 17


def test_axes_without_messages_share_their_witnesses() -> None:
    """Second, middle and last on all of them at once, beside the stages of the pipeline."""
    job = Job((8, 16, 8), lambda c: c[0], sends=True)
    plan = job.plan()
    assert job.misjudged(plan) == []
    places = [tuple(job.coordinates(rank)) for rank in plan.witnesses]
    assert places == [(0, 1, 1), (0, 8, 4), (0, 15, 7), (7, 15, 7)]
    assert len(job.traces) == 8 + len(places)


def test_a_witness_that_contradicts_has_each_axis_looked_at() -> None:
    """The one of several that makes the difference is found."""
    job = Job((4, 16, 8), lambda c: 10 * c[0] + int(c[1] >= 5), sends=True)
    plan = job.plan()
    assert job.misjudged(plan) == []
    assert set(plan.distinct) == {"p", "d"}


def test_the_far_corner_is_captured_beside_the_first() -> None:
    """It is needed in any case, and nothing else can be before the first is known."""
    job = Job((4, 4), lambda c: 0)
    job.plan()
    assert job.batches[0] == [0, 15]


def test_axes_that_matter_are_captured_in_full_product() -> None:
    """Programs that depend on two coordinates at once."""
    job = Job((2, 4, 2), lambda c: 10 * c[0] + c[2])
    plan = job.plan()
    assert job.misjudged(plan) == []
    assert set(plan.distinct) == {"p", "t"}


def test_the_far_corner_is_a_witness() -> None:
    """A difference that shows only away from rank 0 is found there."""
    job = Job((4, 4), lambda c: int(c[0] == 3 and c[1] == 3))
    plan = job.plan()
    assert job.misjudged(plan) == []


def test_a_captured_rank_always_stands_for_its_own_program() -> None:
    """Even where it fits no cell of the mesh."""
    job = Job((4, 4), lambda c: int(c == [0, 2]))
    plan = job.plan()
    captured = list(job.traces)
    assert [r for r in job.misjudged(plan) if r in captured] == []


def test_too_many_programs_are_refused() -> None:
    """With the option that allows more."""
    with pytest.raises(UsageError, match="--max-captures 8"):
        Job((32, 2), lambda c: c[0]).plan(max_captures=8)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)),
    borders=st.lists(st.integers(1, 6), max_size=2),
    axis=st.integers(0, 2),
)
def test_programs_that_differ_along_one_axis_are_all_told_apart(
    shape: tuple[int, int, int], borders: list[int], axis: int
) -> None:
    """Prefix borders along any axis: first, second, middle, last and what lies between."""
    job = Job(shape, lambda c: sum(c[axis] >= b for b in borders))
    assert job.misjudged(job.plan()) == []


def test_a_quick_plan_compares_equal_ranks_with_the_last_one_only() -> None:
    """Where no axis has messages."""
    job = Job((4, 8, 2), lambda c: 0)
    job.plan(quick=True)
    assert sorted(job.traces) == [0, 63]


def test_a_quick_plan_looks_at_every_pipeline_stage() -> None:
    """At the first, second, middle and last, and at one rank more, the last."""
    job = Job((4, 8, 2), lambda c: c[0], sends=True)
    plan = job.plan(quick=True)
    assert sorted(job.traces) == [0, 16, 32, 48, 63]
    assert job.misjudged(plan) == []


@settings(deadline=None, max_examples=30)
@given(shape=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)), data=st.data())
def test_a_quick_plan_looks_at_every_axis_where_the_last_rank_differs(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    """A border anywhere puts the last rank on its other side."""
    axis = data.draw(st.integers(0, 2))
    border = data.draw(st.integers(1, max(shape[axis] - 1, 1)))
    job, whole = (Job(shape, lambda c: int(c[axis] >= border)) for _ in range(2))
    assert job.misjudged(job.plan(quick=True)) == []
    whole.plan()
    assert job.traces.keys() <= whole.traces.keys()


def test_nothing_is_captured_twice() -> None:
    """Ranks that several questions need are asked for once."""
    job = Job((4, 4, 2), lambda c: c[0])
    job.plan()
    asked = [rank for batch in job.batches for rank in batch]
    assert len(asked) == len(set(asked))
