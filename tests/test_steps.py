"""Steps found in a running program: optimizer calls, markers, and the period of both."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismscale.capture.steps import MAX_OPTIMIZERS, find_period, find_steady, watch_steps
from prismscale.capture.stream import NodeStream, StreamNode
from prismscale.errors import UsageError
from prismscale.graph.node import NodeKind


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def optimizer_begins(self) -> None:
        """An optimizer begins."""
        self.told.append("begins")

    def optimizer_ended(self) -> None:
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
    body=st.lists(st.sampled_from("abc"), min_size=1, max_size=MAX_OPTIMIZERS),
    warm_up=st.lists(st.sampled_from("xyz"), max_size=4),
    repeats=st.integers(2, 4),
)
def test_the_period_is_the_shortest_that_repeats(
    body: list[str], warm_up: list[str], repeats: int
) -> None:
    """Whatever came before; a body that itself repeats has a shorter one."""
    signatures = warm_up + body * repeats
    period = find_period(signatures, repeats)
    assert period is not None
    assert period <= len(body)
    tail = signatures[-period * repeats :]
    assert tail == tail[:period] * repeats


@given(signatures=st.lists(st.integers(), unique=True, max_size=40), repeats=st.integers(2, 4))
def test_what_never_repeats_has_no_period(signatures: list[str], repeats: int) -> None:
    """Every segment differs from all others."""
    assert find_period(signatures, repeats) is None


HOST, GROUP = 0, 1


def step(stream: NodeStream, *, once: int = 0, follows: int | None = None) -> int:
    """One step: a communication after ``follows``, if any, and ``once`` nodes of its own."""
    preds = () if follows is None else (follows,)
    position = stream.append(
        StreamNode(kind=NodeKind.COLLECTIVE, preds=preds, lane=GROUP, label=0, role=0)
    )
    for _ in range(1 + once):
        stream.append(StreamNode(kind=NodeKind.COMPUTE, preds=(position,), lane=HOST, label=0))
    stream.mark()
    return position


def test_what_lay_between_two_of_a_lane_once_does_not_matter() -> None:
    """The third step follows the second's communication across what only the second did."""
    stream = NodeStream()
    first = step(stream)
    second = step(stream, once=1, follows=first)
    third = step(stream, follows=second)
    assert find_steady(stream, 2) is None
    step(stream, follows=third)
    assert find_steady(stream, 2) == 1


def test_an_edge_from_far_back_must_pass_over_equal_steps() -> None:
    """Its distance is that of every later step only then."""
    stream = NodeStream()
    positions = [step(stream), step(stream, once=2)]
    for _ in range(2):
        positions.append(step(stream, follows=positions[-2]))
        assert find_steady(stream, 2) is None
    step(stream, follows=positions[-2])
    assert find_steady(stream, 2) == 1


def test_an_edge_from_before_the_program_settled_never_does() -> None:
    """It grows longer with each step."""
    stream = NodeStream()
    first = step(stream)
    for _ in range(5):
        step(stream, follows=first)
        assert find_steady(stream, 2) is None
