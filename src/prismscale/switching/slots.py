"""Chooses which ranks run, where many logical ranks share few slots.

A rank keeps running until it waits for something that no rank in a slot is about to give. It is
suspended only when another rank needs its slot: ranks that are all resident communicate without a
switch. The next rank is chosen by the published rule (PrismLLM, section 4.1): of the ranks that
have not ended and can go on, the one for which most communications wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum


class RankState(Enum):
    """The state of a rank."""

    NEW = "not started"
    RUNNING = "running"
    WAITING = "waiting in a slot"
    SUSPENDED = "suspended"
    ENDED = "ended"


class Slots:
    """The states of all ranks.

    ``missing(rank)`` gives the ranks that a waiting rank waits for. It can go on when there are
    none.
    """

    def __init__(
        self,
        world_size: int,
        n_slots: int,
        *,
        missing: Callable[[int], Iterable[int]],
        pending: Callable[[int], int],
    ) -> None:
        """``pending(rank)`` gives how many communications wait for a rank."""
        self.states = [RankState.NEW] * world_size
        self.switches = 0
        """How often a suspended rank was resumed."""
        self._n_slots = n_slots
        self._missing = missing
        self._pending = pending

    def waits(self, rank: int) -> None:
        """Note that ``rank`` must wait for others."""
        if self.states[rank] is RankState.RUNNING:
            self.states[rank] = RankState.WAITING

    def ended(self, rank: int) -> None:
        """Note that ``rank`` has ended; its slot is free."""
        self.states[rank] = RankState.ENDED

    def next(self) -> tuple[int, RankState] | None:
        """Let the next rank go on. Returns it and its previous state; None if none can now."""
        able = [r for r, s in enumerate(self.states) if self._can_go_on(r, s)]
        resident = [r for r in able if self.states[r] is RankState.WAITING]
        if resident:
            # Resident ranks come first, because they cost no switch.
            return self._go(resident[0])
        if not able or not self._has_room():
            return None
        return self._go(max(able, key=lambda r: (self._pending(r), -r)))

    def go(self, rank: int) -> None:
        """Let ``rank`` go on although its wait is not over, because no other rank can."""
        if self.states[rank] is RankState.WAITING or self._has_room():
            self._go(rank)

    def is_stuck(self) -> bool:
        """Whether ranks are left and none can ever go on. Valid once :meth:`next` returned None."""
        left = any(s is not RankState.ENDED for s in self.states)
        return left and RankState.RUNNING not in self.states

    def _can_go_on(self, rank: int, state: RankState) -> bool:
        if state in (RankState.WAITING, RankState.SUSPENDED):
            return not any(True for _ in self._missing(rank))
        return state is RankState.NEW

    def _has_room(self) -> bool:
        resident = [
            r for r, s in enumerate(self.states) if s in (RankState.RUNNING, RankState.WAITING)
        ]
        if len(resident) < self._n_slots:
            return True
        waiting = [r for r in resident if self.states[r] is RankState.WAITING]
        # A rank that waits only for running ranks keeps its slot: what it needs is on its way.
        idle = [r for r in waiting if not self._comes_from_residents(r)]
        if not idle:
            return False
        self.states[min(idle, key=lambda r: (self._pending(r), r))] = RankState.SUSPENDED
        return True

    def _comes_from_residents(self, rank: int) -> bool:
        return all(self.states[other] is RankState.RUNNING for other in self._missing(rank))

    def _go(self, rank: int) -> tuple[int, RankState]:
        before = self.states[rank]
        self.switches += before is RankState.SUSPENDED
        self.states[rank] = RankState.RUNNING
        return rank, before
