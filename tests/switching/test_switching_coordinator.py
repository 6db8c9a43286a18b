"""Many ranks in few slots: programs of collectives, run by a coordinator without processes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.errors import StuckError
from prismscale.graph.node import CollectiveOp
from prismscale.switching.coordinator import SwitchingCoordinator
from prismscale.switching.slots import RankState

Group = tuple[int, ...]


@dataclass
class World:
    """Ranks that call collectives on groups, one after another."""

    programs: list[list[Group]]
    slots: int
    done: list[int] = field(default_factory=list)
    most_running: int = 0

    def __post_init__(self) -> None:
        self.coordinator = SwitchingCoordinator(
            world_size=len(self.programs), n_slots=self.slots, start=self._start
        )
        self._able: list[int] = []
        self._places = [0] * len(self.programs)
        self._uses: dict[tuple[int, Group], int] = {}

    def _start(self, rank: int) -> None:
        self._able.append(rank)

    def run(self) -> None:
        """Let ranks go on, the youngest first, until all have ended."""
        self.coordinator.advance()
        while self._able:
            rank = self._able.pop()
            self._go_on(rank)
            self.coordinator.advance()
            states = self.coordinator.slots.states
            running = sum(s in (RankState.RUNNING, RankState.WAITING) for s in states)
            self.most_running = max(self.most_running, running)

    def _go_on(self, rank: int) -> None:
        place = self._places[rank]
        if place == len(self.programs[rank]):
            self.done.append(rank)
            self.coordinator.ended(rank, stopped=False)
            return
        group = self.programs[rank][place]
        self._places[rank] += 1
        name = f"{group}.{self._next(rank, group)}"
        told = {"name": name, "op": int(CollectiveOp.ALL_GATHER), "members": list(group)}
        self.coordinator.asked(rank, {"ask": "issue", "parts": [told]}, lambda _: None)
        question = {"ask": "wait", "names": [name]}
        self.coordinator.asked(rank, question, lambda _: self._able.append(rank))

    def _next(self, rank: int, group: Group) -> int:
        n = self._uses.get((rank, group), 0)
        self._uses[rank, group] = n + 1
        return n


def legal(groups: list[Group], world_size: int) -> list[list[Group]]:
    """Each rank calls its groups in one order that all share."""
    return [[g for g in groups if rank in g] for rank in range(world_size)]


@st.composite
def jobs(draw: Any) -> tuple[list[list[Group]], int]:
    """A legal job of up to 8 ranks, and a number of slots."""
    world_size = draw(st.integers(1, 8))
    ranks = st.integers(0, world_size - 1)
    members = st.sets(ranks, min_size=1).map(lambda found: tuple(sorted(found)))
    groups = draw(st.lists(members, max_size=20))
    return legal(groups, world_size), draw(st.integers(1, 4))


@given(jobs())
def test_legal_jobs_end_in_any_number_of_slots(job: tuple[list[list[Group]], int]) -> None:
    """And no more ranks are resident than there are slots."""
    programs, slots = job
    world = World(programs, slots)
    world.run()
    assert sorted(world.done) == list(range(len(programs)))
    assert world.most_running <= slots


def test_resident_ranks_communicate_without_a_switch() -> None:
    """Two ranks in two slots."""
    world = World(legal([(0, 1)] * 10, 2), 2)
    world.run()
    assert world.coordinator.slots.switches == 0


def test_each_barrier_of_all_resumes_those_who_wait() -> None:
    """With one slot, all but the last to arrive come back once a barrier."""
    world = World(legal([(0, 1, 2, 3)] * 5, 4), 1)
    world.run()
    assert world.coordinator.slots.switches == 5 * 3


def test_a_deadlock_is_explained() -> None:
    """Two ranks call two groups in opposite order; another waits for one of them."""
    both, all_three = (0, 1), (0, 1, 2)
    world = World([[both, all_three], [all_three, both], [all_three]], 2)
    with pytest.raises(StuckError) as raised:
        world.run()
    text = str(raised.value)
    assert "rank 0 waits for all_gather" in text
    assert "not issued by rank 1" in text
    assert "rank 2 waits for" in text


def test_ranks_that_all_wait_may_have_another_thread_that_computes() -> None:
    """They are stuck when none has asked for something for a while."""
    world = World([[(0, 1), (0, 1, 2)], [(0, 1, 2), (0, 1)], [(0, 1, 2)]], 2)
    world.coordinator.patience_s = 0.3
    world.run()
    time.sleep(0.4)
    with pytest.raises(StuckError):
        world.coordinator.advance()


def test_a_rank_that_ended_too_early_is_named() -> None:
    """The others wait for it."""
    world = World([[(0, 1)], []], 2)
    with pytest.raises(StuckError, match="rank 1 has ended"):
        world.run()


def test_a_read_of_a_store_waits_for_the_write() -> None:
    """And a counter is one for all ranks."""
    coordinator = SwitchingCoordinator(world_size=2, n_slots=2, start=lambda rank: None)
    coordinator.advance()
    told: list[dict[str, Any]] = []

    def ask(rank: int, do: str, key: str, value: Any = "") -> None:
        question = {"ask": "store", "do": do, "store": "s", "key": key, "value": value}
        coordinator.asked(rank, question, told.append)
        coordinator.advance()

    ask(0, "read", "k")
    assert told == []
    ask(1, "write", "k", "v")
    assert told == [{"value": None}, {"value": "v"}]
    ask(0, "add", "n", 1)
    ask(1, "add", "n", 2)
    assert [t["value"] for t in told[2:]] == [1, 3]


def test_a_rank_that_only_asks_lets_others_run_first() -> None:
    """In one slot: it hears no when nobody else can go on, and yes when all have come."""
    started: list[int] = []
    coordinator = SwitchingCoordinator(world_size=2, n_slots=1, start=started.append)
    coordinator.advance()
    told: list[dict[str, Any]] = []
    part = {"name": "a", "op": int(CollectiveOp.ALL_GATHER), "members": [0, 1]}

    def ask(rank: int, kind: str, **more: Any) -> None:
        coordinator.asked(rank, {"ask": kind, **more}, told.append)
        coordinator.advance()

    ask(0, "issue", parts=[part])
    told.clear()
    ask(0, "poll", names=["a"])
    assert (started, told) == ([0, 1], [])
    ask(1, "store", do="read", store="s", key="k")
    assert told == [{"complete": False}]
    ask(0, "store", do="write", store="s", key="k", value="v")
    ask(0, "poll", names=["a"])
    ask(1, "issue", parts=[part])
    told.clear()
    ask(1, "wait", names=["a"])
    assert {"complete": True} in told


def test_a_wait_is_answered_while_another_thread_of_its_rank_runs() -> None:
    """A helper thread waits for x and the main thread for y; y is complete first."""
    coordinator = SwitchingCoordinator(world_size=2, n_slots=2, start=lambda rank: None)
    coordinator.advance()
    told: dict[str, list[Any]] = {"x": [], "y": [], "": []}

    def ask(rank: int, kind: str, name: str, heard: str = "") -> None:
        part = {"name": name, "op": int(CollectiveOp.ALL_GATHER), "members": [0, 1]}
        question = {"ask": kind, "parts": [part], "names": [name]}
        coordinator.asked(rank, question, told[heard].append)
        coordinator.advance()

    ask(0, "issue", "x")
    ask(0, "issue", "y")
    ask(0, "wait", "x", heard="x")
    ask(1, "issue", "y")
    ask(0, "wait", "y", heard="y")
    assert (told["x"], told["y"]) == ([], [{"complete": True}])
    ask(1, "issue", "x")
    assert told["x"] == [{"complete": True}]


def test_progress_is_steps_of_all_ranks_and_states() -> None:
    """As ranks said when they last communicated."""
    coordinator = SwitchingCoordinator(world_size=3, n_slots=1, start=lambda rank: None)
    coordinator.advance()
    part = {"name": "a", "op": int(CollectiveOp.ALL_GATHER), "members": [0, 1, 2]}
    for rank, step in ((0, 4), (1, 2)):
        told = {"ask": "issue", "parts": [part], "step": step}
        coordinator.asked(rank, told, lambda _: None)
        coordinator.asked(rank, {"ask": "wait", "names": ["a"]}, lambda _: None)
        coordinator.advance()
    assert coordinator.progress() == (6, "ranks: 1 running, 2 suspended")
