"""Steps found in a running program: optimizer calls, markers, and the period of both."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismscale.capture.node_stream import NodeStream, StreamNode
from prismscale.capture.step_kinds import (
    calls_per_step,
    most_ordinary,
    ordinary_kind,
    steps_of,
)
from prismscale.emulation.step_detection import watch_steps
from prismscale.errors import UsageError
from prismscale.graph.node import NodeKind


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def optimizer_begins(self) -> None:
        """An optimizer begins."""
        self.told.append("begins")

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """An optimizer ended."""
        self.told.append("ended")


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a function and a method that end steps."""
    module = types.ModuleType("a_trainer")
    code = "def step(x):\n    return x + 1\nclass Loop:\n    def turn(self):\n        return 7\n"
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "a_trainer", module)
    return module


def test_every_optimizer_call_is_seen(listener: Listener) -> None:
    """Of any optimizer, before and after; nothing once the context is left."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizers = [torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])]
    with watch_steps(listener):
        for optimizer in optimizers:
            optimizer.step()
    optimizers[0].step()
    assert listener.told == ["begins", "ended"] * 2


def test_a_marker_takes_the_place_of_optimizers(
    listener: Listener, trainer: types.ModuleType
) -> None:
    """Each return of the function ends a step; what it returns is passed on."""
    original = trainer.step
    with watch_steps(listener, "a_trainer:step"):
        assert trainer.step(1) == 2
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
    assert listener.told == ["ended"]
    assert trainer.step is original


def test_a_marker_may_be_a_method(listener: Listener, trainer: types.ModuleType) -> None:
    """``module:Class.method``, for all objects of the class."""
    with watch_steps(listener, "a_trainer:Loop.turn"):
        assert trainer.Loop().turn() == 7
    assert listener.told == ["ended"]


@pytest.mark.parametrize("marker", ["a_trainer:stop", "no_such:step", "a_trainer", "", ":"])
def test_a_marker_that_is_not_there_is_refused(
    listener: Listener, trainer: types.ModuleType, marker: str
) -> None:
    """With how to write one."""
    with (
        pytest.raises(UsageError, match="give module:function"),
        watch_steps(listener, marker),
    ):
        pass


@given(
    step=st.lists(st.integers(0, 30), min_size=1, max_size=16, unique=True),
    repeats=st.integers(2, 4),
)
def test_a_step_calls_each_of_its_optimizers_once(step: list[int], repeats: int) -> None:
    """However many there are: they follow each other in the same order."""
    assert calls_per_step(step * repeats) == len(step)


def test_a_step_may_have_an_optimizer_for_each_parameter() -> None:
    """Each is called in the backward pass, as soon as its gradient is there."""
    assert calls_per_step(list(range(300)) * 2) == 300


def test_optimizers_that_are_called_unequally_often_make_one_step() -> None:
    """Two calls of the discriminator's and one of the generator's."""
    assert calls_per_step([7, 7, 9] * 3) == 3


HOST, GROUP = 0, 1


def step(stream: NodeStream, *, once: int = 0, follows: int | None = None) -> int:
    """One step: a communication after ``follows``, if any, and ``once`` nodes of its own."""
    preds = () if follows is None else (follows,)
    position = stream.append(
        StreamNode(kind=NodeKind.COLLECTIVE, preds=preds, lane=GROUP, label=0, group_index=0)
    )
    for _ in range(1 + once):
        stream.append(StreamNode(kind=NodeKind.COMPUTE, preds=(position,), lane=HOST, label=0))
    stream.mark()
    return position


def settled(stream: NodeStream) -> bool:
    """Whether the ordinary step is known."""
    return ordinary_kind(stream, steps_of(stream), 2) is not None


def test_what_lay_between_two_of_a_lane_once_does_not_matter() -> None:
    """The third step follows the second's communication across what only the second did."""
    stream = NodeStream()
    first = step(stream)
    second = step(stream, once=1, follows=first)
    third = step(stream, follows=second)
    assert not settled(stream)
    step(stream, follows=third)
    assert settled(stream)


def test_an_edge_from_far_back_must_pass_over_equal_steps() -> None:
    """Its distance is that of every later step only then."""
    stream = NodeStream()
    positions = [step(stream), step(stream, once=2)]
    for _ in range(2):
        positions.append(step(stream, follows=positions[-2]))
        assert not settled(stream)
    step(stream, follows=positions[-2])
    assert settled(stream)


def test_an_edge_from_before_the_program_settled_never_does() -> None:
    """It grows longer with each step."""
    stream = NodeStream()
    first = step(stream)
    for _ in range(5):
        step(stream, follows=first)
        assert not settled(stream)


def program(kinds: str) -> NodeStream:
    """One step for each letter: as many nodes of its own as its place in the alphabet."""
    stream = NodeStream()
    before = None
    for letter in kinds:
        before = step(stream, once=ord(letter) - ord("a"), follows=before)
    return stream


def ordinary(kinds: str) -> str | None:
    """The letter of the ordinary step; None while it is not known."""
    stream = program(kinds)
    steps = steps_of(stream)
    kind = ordinary_kind(stream, steps, 2)
    return next((letter for letter, s in zip(kinds, steps, strict=True) if s.kind == kind), None)


@pytest.mark.parametrize(
    ("kinds", "letter"),
    [("aaa", "a"), ("ab", None), ("cbabab", "a"), ("bacad", None), ("abbabb", "b"), ("aca", None)],
)
def test_the_ordinary_step_is_found(kinds: str, letter: str | None) -> None:
    """Two in a row, or a pattern that was seen twice: then the one with less to do."""
    assert ordinary("d" + kinds) == letter


def test_of_equally_frequent_steps_the_smaller_one_is_ordinary() -> None:
    """Evaluation every second step adds to a step, it takes nothing away."""
    steps = steps_of(program("dababab"))[1:]
    assert most_ordinary(steps) == steps[0].kind


@given(st.lists(st.sampled_from("abc"), min_size=3, max_size=12))
def test_steps_are_numbered_and_cover_the_stream(kinds: list[str]) -> None:
    """From 1, each beginning where the one before ended."""
    stream = program("".join(kinds))
    steps = steps_of(stream)
    assert [s.number for s in steps] == list(range(1, len(kinds) + 1))
    assert [s.start for s in steps] == [0, *(s.stop for s in steps[:-1])]
    assert len({s.kind for s in steps[1:]}) == len(set(kinds[1:]))


def test_a_step_that_comes_often_among_others_is_ordinary() -> None:
    """Logging every second, checkpoints every fourth and evaluation every fifth step."""
    assert ordinary("dbaceba") is None
    assert ordinary("dbacebaca") == "a"
