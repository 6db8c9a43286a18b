"""A program run plainly: where its steps end, and what it is counted to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prismscale.emulation.script import StopProgram
from prismscale.measure.plain_program import CountOperations, StepEnds, parse, through_gloo


class CountedEvent:
    """As ``torch.cuda.Event``: the n-th that is recorded is at n ms."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        type(self).recorded += 1
        self.at_ms = self.recorded

    def elapsed_time(self, other: CountedEvent) -> float:
        return float(other.at_ms - self.at_ms)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device on which a call takes a millisecond."""
    monkeypatch.setattr(CountedEvent, "recorded", 0)
    monkeypatch.setattr(torch.cuda, "Event", CountedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("optimizers", ["a", "ab", "aab"])
def test_a_step_is_all_the_optimizers_that_repeat(optimizers: str) -> None:
    """The program is stopped with the last call of the last step; steps last all their calls."""
    ends = StepEnds(3)
    *earlier, last = map(ord, optimizers * 3)
    for optimizer in earlier:
        ends.optimizer_ended(optimizer)
    with pytest.raises(StopProgram):
        ends.optimizer_ended(last)
    assert ends.step_ns() == (len(optimizers) * 1_000_000,) * 2


def test_operations_are_counted() -> None:
    """By overload, and they still give what they give."""
    with CountOperations() as counting:
        assert (torch.ones(2) + torch.ones(2)).tolist() == [2, 2]
    assert counting.calls["aten.add.Tensor"] == 1
    assert counting.calls["aten.ones.default"] == 2


def test_whatever_backend_is_asked_for_is_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks on one GPU cannot use NCCL; what NCCL alone takes is left out."""
    asked: list[tuple[object, dict[str, object]]] = []
    original = lambda backend=None, **named: asked.append((backend, named))  # noqa: E731
    monkeypatch.setattr(torch.distributed, "init_process_group", original)
    with through_gloo():
        torch.distributed.init_process_group("nccl", device_id="cuda:0", rank=1)
        torch.distributed.init_process_group()
    assert asked == [("gloo", {"rank": 1}), ("gloo", {})]
    assert torch.distributed.init_process_group is original


def test_what_follows_the_first_dashes_is_the_programs(tmp_path: Path) -> None:
    """Further ones, too."""
    (tmp_path / "train.py").touch()
    program = [f"{tmp_path}/train.py", "--steps", "9", "--", "x"]
    options, script = parse(["out.json", "--steps", "4", "--operations", "--", *program])
    assert (options.out, options.steps, options.operations) == (Path("out.json"), 4, True)
    assert (script.target, script.args) == (program[0], tuple(program[1:]))
