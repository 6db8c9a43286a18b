"""Ranks that stay within a budget of memory: whose is pressed out, and that it comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.switching.coordinator import SwitchingCoordinator
from prismscale.switching.memory_budget import MemoryBudget

MIB = 1 << 20


def told(budget: MemoryBudget, *held: int, base: int = 10) -> MemoryBudget:
    """Ranks that hold so much beside ``base`` each."""
    for rank, n in enumerate(held):
        budget.told(rank, n, base)
    return budget


def test_whoever_fits_goes_on() -> None:
    """Nobody is pressed out."""
    assert told(MemoryBudget(100), 30, 30).enter(0, [1]) is None


def test_as_many_as_needed_are_pressed_out_before_another_goes_on() -> None:
    """In the order given; meanwhile nobody else goes on."""
    budget = told(MemoryBudget(100), 30, 30, 30, 30)
    assert budget.enter(0, [3, 2, 1]) == [3, 2]
    assert budget.enter(0, [3, 2, 1]) == []
    budget.pressed(3, 10)
    budget.pressed(2, 10)
    assert budget.enter(0, [3, 2, 1]) is None
    assert budget.presses == 2


def test_who_was_pressed_out_takes_its_memory_again() -> None:
    """So another must go."""
    budget = told(MemoryBudget(100), 30, 30, 30)
    assert budget.enter(0, [2, 1]) == [2]
    budget.pressed(2, 10)
    assert budget.enter(2, [1, 0]) == [1]


def test_who_has_ended_takes_nothing() -> None:
    """Its share is free."""
    budget = told(MemoryBudget(100), 40, 40)
    budget.ended(1)
    assert budget.enter(0, []) is None


def test_the_command_itself_is_in_the_budget() -> None:
    """What it takes is not there for ranks."""
    assert told(MemoryBudget(100, besides_bytes=41), 30, 30).enter(0, [1]) == [1]


def test_a_budget_that_cannot_do_is_refused() -> None:
    """With what would."""
    with pytest.raises(UsageError, match=r"too little: .* 2 ranks .* give 0\.09GiB or more"):
        told(MemoryBudget(10 << 20), 30 << 20, 40 << 20, base=10 << 20).enter(0, [])


GATHER = {"name": "a", "op": int(CollectiveOp.ALL_GATHER), "members": [0, 1]}


class TwoRanks:
    """Two ranks in one slot and 400 MiB; options are the coordinator's."""

    def __init__(self, **options: Any) -> None:
        self.started: list[int] = []
        self.heard: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        budget = MemoryBudget(400 * MIB)
        self._coordinator = SwitchingCoordinator(
            world_size=2, n_slots=1, start=self.started.append, budget=budget, **options
        )
        self._coordinator.advance()

    def ask(self, rank: int, kind: str, **more: Any) -> None:
        """A rank asks, and whoever can goes on."""
        self._coordinator.asked(rank, {"ask": kind, **more}, self.heard[rank].append)
        self._coordinator.advance()

    def end(self, rank: int) -> None:
        """Its process ends well."""
        self._coordinator.ended(rank, stopped=False)
        self._coordinator.advance()


def test_a_suspended_rank_is_pressed_out_before_the_next_goes_on() -> None:
    """It is asked where it waits, and has its answer later."""
    two = TwoRanks()
    ask, heard, started = two.ask, two.heard, two.started
    ask(0, "issue", parts=[GATHER], held=150 * MIB, base=100 * MIB)
    ask(0, "wait", names=["a"], held=150 * MIB)
    assert (started, heard[0][-1]) == ([0], {"press": True})
    ask(0, "pressed", base=50 * MIB)
    assert started == [0, 1]
    ask(1, "issue", parts=[GATHER], held=150 * MIB, base=100 * MIB)
    ask(1, "wait", names=["a"], held=150 * MIB)
    two.end(1)
    assert heard[0][-1] == {"complete": True}


def test_a_rank_that_only_asks_goes_on_within_the_budget() -> None:
    """It was pressed out; the other is, before it hears that nothing is complete yet."""
    two = TwoRanks()
    ask, heard = two.ask, two.heard
    ask(0, "issue", parts=[GATHER], held=150 * MIB, base=100 * MIB)
    ask(0, "poll", names=["a"], held=150 * MIB)
    ask(0, "pressed", base=50 * MIB)
    ask(1, "store", do="read", store="s", key="k", held=250 * MIB, base=50 * MIB)
    assert (heard[0][-1], heard[1][-1]) == ({"press": True}, {"press": True})
    ask(1, "pressed", base=50 * MIB)
    assert heard[0][-1] == {"complete": False}


def test_a_rank_may_end_while_one_of_its_threads_waits_for_memory() -> None:
    """The other then goes on."""
    two = TwoRanks(patience_s=60)

    def ask(rank: int, do: str, key: str, **more: Any) -> None:
        two.ask(rank, "store", do=do, store="s", key=key, **more)

    ask(0, "read", "k", held=150 * MIB, base=100 * MIB)
    two.ask(0, "pressed", base=50 * MIB)
    ask(1, "write", "k", value="v", held=150 * MIB, base=100 * MIB)
    ask(1, "read", "other")
    assert two.heard[1][-1] == {"press": True}
    two.end(0)
    two.ask(1, "pressed", base=50 * MIB)
    ask(1, "write", "other", value="w")
    assert two.heard[1][-1] == {"value": "w"}


PRESSED = """
import sys
from pathlib import Path
import torch
from prismscale.switching.spilled_memory import SpilledMemory, resident_bytes
memory = SpilledMemory(Path(sys.argv[1]), 150 << 20)
count = torch.arange(8 << 20, dtype=torch.int32)
x = count.clone()
del_me = torch.ones(4 << 20)
del del_me
full = resident_bytes()
memory.press_out()
print(full - resident_bytes() > 30 << 20, torch.equal(x, count))
x += 1
memory.press_out()
print(int(x.sum(dtype=torch.int64)) == sum(range(1, (8 << 20) + 1)), memory.take_peak() >= 32 << 20)
try:
    torch.empty(200 << 20)
except RuntimeError as error:
    print("full" in str(error))
print(list(Path(sys.argv[1]).iterdir()))
"""


def test_pressed_out_memory_comes_back_as_it_was(tmp_path: Path) -> None:
    """The process takes less meanwhile; a full store is an error of the allocation; no file is
    left behind."""
    command = [sys.executable, "-c", PRESSED, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["True True", "True True", "True", "[]"]


FORKED = """
import os
import sys
from pathlib import Path
import torch
from prismscale.switching.spilled_memory import SpilledMemory

torch.set_num_threads(1)
memory = SpilledMemory(Path(sys.argv[1]), 64 << 20)
count = torch.arange(1 << 20)
mine = count.clone()
spare = torch.ones(1 << 20)
del spare
child = os.fork()
if not child:
    is_whole = torch.equal(mine, count)
    made = torch.full((1 << 20,), 7)
    mine.fill_(3)
    grandchild = os.fork()
    if not grandchild:
        os._exit(not bool((mine == 3).all()))
    failed = os.waitpid(grandchild, 0)[1]
    memory.press_out()
    print(is_whole, bool((made == 7).all()), bool((mine == 3).all()), failed == 0, flush=True)
    os._exit(0)
os.waitpid(child, 0)
after = torch.full((1 << 19,), 9)
print(torch.equal(mine, count), bool((after == 9).all()))
"""


def test_a_forked_child_leaves_the_ranks_tensors_alone(tmp_path: Path) -> None:
    """It has them as they were, makes its own and changes both; so does a child of the child."""
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines() == ["True True True True", "True True"]
