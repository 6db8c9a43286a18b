"""Ranks that repeat what a captured one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prismscale.capture.node_stream import NodeStream, StreamNode
from prismscale.capture.witness import Witness, in_place_of
from prismscale.devices.cpu import CpuDevice
from prismscale.graph.io import save_trace
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import GroupRecord, MemoryRecord
from support.recorded_steps import trace_of

WORLD = 8
GROUPS = (GroupRecord(ranks=tuple(range(WORLD))), GroupRecord(ranks=(0, 1)))
Step = dict[str, int]
"""Fields of the step's communication that are not as always."""


def recorded(*steps: Step, compute_ns: int = 30, lane: str = "group") -> NodeStream:
    """Steps of a computation and a communication that follows the one of the step before."""
    stream = NodeStream()
    before: tuple[int, ...] = ()
    for step in steps:
        compute = StreamNode(kind=NodeKind.COMPUTE, preds=before, lane=0, label=0)
        position = stream.append(replace(compute, began=100, ended=100 + compute_ns))
        communication = StreamNode(
            kind=NodeKind.COLLECTIVE,
            preds=(position,),
            lane=stream.lanes.id(lane),
            label=0,
            op=CollectiveOp.BROADCAST,
            group_index=1,
            peer=0,
            n_bytes=64,
        )
        before = (stream.append(replace(communication, **step)),)  # type: ignore[arg-type]
        stream.mark()
    return stream


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 0, captured: a first step, a steady one, and the one that was found equal to it."""
    stream = recorded({}, {}, {})
    trace = trace_of(stream, CpuDevice(), GROUPS, rank=0, world_size=WORLD, samples=1)
    save_trace(trace, tmp_path / "rank-0.parquet")
    return tmp_path


def recognised(
    folder: Path, stream: NodeStream, groups: Sequence[GroupRecord] = GROUPS
) -> int | None:
    """The rank that did what ``stream`` holds."""
    witness = Witness(folder, CpuDevice())
    found = witness.recognise(stream, groups)
    return None if found is None else found.rank


def test_a_rank_is_recognised_after_a_steady_step(folder: Path) -> None:
    """Not before: the first step alone says nothing of those that follow."""
    assert recognised(folder, recorded({})) is None
    assert recognised(folder, recorded({}, {})) == 0


def test_a_trace_that_appears_meanwhile_is_seen(folder: Path, tmp_path: Path) -> None:
    """Ranks are captured side by side."""
    empty = tmp_path / "later"
    empty.mkdir()
    witness = Witness(empty, CpuDevice())
    assert witness.recognise(recorded({}, {}), GROUPS) is None
    (folder / "rank-0.parquet").rename(empty / "rank-0.parquet")
    assert witness.recognise(recorded({}, {}), GROUPS) is not None


@pytest.mark.parametrize(
    "difference",
    [
        {"n_bytes": 65},
        {"peer": 1},
        {"group_index": 0},
        {"op": CollectiveOp.REDUCE},
        {"preds": ()},
        {"lane": 0},
    ],
    ids=str,
)
def test_any_difference_is_noticed(folder: Path, difference: Step) -> None:
    """In whichever step it lies."""
    assert recognised(folder, recorded(difference, {})) is None
    assert recognised(folder, recorded({}, difference)) is None


def test_another_duration_is_another_program(folder: Path) -> None:
    """Modelled time is equal for equal kernels, so it tells of kernels that differ."""
    assert recognised(folder, recorded({}, {}, compute_ns=31)) is None


def test_groups_of_another_size_are_another_program(folder: Path) -> None:
    """By group index; which ranks they hold does not matter."""
    elsewhere = (GROUPS[0], GroupRecord(ranks=(2, 3)))
    larger = (GROUPS[0], GroupRecord(ranks=(2, 3, 4)))
    assert recognised(folder, recorded({}, {}), elsewhere) == 0
    assert recognised(folder, recorded({}, {}), larger) is None


def test_a_followed_trace_keeps_what_is_its_own(folder: Path) -> None:
    """Rank, groups and memory; the program is the other's."""
    found = Witness(folder, CpuDevice()).recognise(recorded({}, {}), GROUPS)
    assert found is not None
    memory = MemoryRecord(peak_bytes=7, peak_step=0)
    own = (GROUPS[0], GroupRecord(ranks=(2, 3)))
    trace = in_place_of(found, 3, own, own, memory)
    assert (trace.rank, trace.groups, trace.memory) == (3, own, memory)
    assert trace.fingerprint() == found.fingerprint()
    assert trace.facts.equivalent_to == 0


def test_whoever_follows_a_follower_names_the_rank_that_was_captured(folder: Path) -> None:
    """Only that one left a log of its launches, which other costs are made of."""
    found = Witness(folder, CpuDevice()).recognise(recorded({}, {}), GROUPS)
    assert found is not None
    first = in_place_of(found, 3, GROUPS, GROUPS, None)
    second = in_place_of(first, 5, GROUPS, GROUPS, None)
    assert second.captured_as == 0
