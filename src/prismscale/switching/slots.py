"""Which ranks run: many logical ranks share few slots.

A rank runs until it waits for what no rank in a slot is about to give. It is suspended only when
another needs its slot: participants that are all resident communicate without a switch. Who comes
next is the published rule (PrismLLM, section 4.1): of the ranks that have not ended and can go on,
the one for which most communications wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum


class RankState(Enum):
    """What a rank does."""

    NEW = "not started"
    RUNNING = "running"
    WAITING = "waiting in a slot"
    SUSPENDED = "suspended"
    ENDED = "ended"


class Slots:
    """The states of all ranks. ``missing(rank)`` tells whom a rank that waits is waiting for; it
    can go on when there is nobody."""

    def __init__(
        self,
        world_size: int,
        n_slots: int,
        *,
        missing: Callable[[int], Iterable[int]],
        pending: Callable[[int], int],
    ) -> None:
        """``pending``: how many communications wait for a rank."""
        self.states = [RankState.NEW] * world_size
        self.switches = 0
        """How often a rank was resumed that had been suspended."""
        self._n_slots = n_slots
        self._missing = missing
        self._pending = pending

    def waits(self, rank: int) -> None:
        """``rank`` cannot go on by itself."""
        if self.states[rank] is RankState.RUNNING:
            self.states[rank] = RankState.WAITING

    def ended(self, rank: int) -> None:
        """``rank`` has ended, and its slot is free."""
        self.states[rank] = RankState.ENDED

    def next(self) -> tuple[int, RankState] | None:
        """The next rank to let go on, and what it did before; None if nobody can now."""
        able = [r for r, s in enumerate(self.states) if self._can_go_on(r, s)]
        resident = [r for r in able if self.states[r] is RankState.WAITING]
        if resident:
            # Before others: it costs no switch.
            return self._go(resident[0])
        if not able or not self._has_room():
            return None
        return self._go(max(able, key=lambda r: (self._pending(r), -r)))

    def go(self, rank: int) -> None:
        """Let ``rank`` go on although it lacks what it waits for, when nobody else can."""
        if self.states[rank] is RankState.WAITING or self._has_room():
            self._go(rank)

    def is_stuck(self) -> bool:
        """Whether ranks are left and none of them will ever go on; after :meth:`next` said None."""
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
        # Not one that waits for those beside it only: what it needs is on its way.
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
