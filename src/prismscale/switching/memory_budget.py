"""Chooses whose memory is written out to disk, so that a job's ranks stay within a budget."""

from __future__ import annotations

from collections.abc import Iterable

from prismscale.errors import UsageError

GUESS_BYTES = 256 << 20
"""Memory assumed for a rank that has not reported any yet."""


class MemoryBudget:
    """Memory of all ranks' processes together, as they report it."""

    def __init__(self, budget_bytes: int, *, besides_bytes: int = 0) -> None:
        """
        Args:
            budget_bytes: budget of all ranks and of what runs besides.
            besides_bytes: memory of what runs besides: the command itself.
        """
        self._budget = budget_bytes
        self._besides = besides_bytes
        self._base: dict[int, int] = {}
        """By rank: bytes that cannot be written out."""
        self._held: dict[int, int] = {}
        """By rank: bytes of its tensors when they are in memory."""
        self._out: set[int] = set()
        self._leaving: set[int] = set()
        self.presses = 0
        """How often a rank's memory was written out."""

    def told(self, rank: int, held: int, base: int | None) -> None:
        """Note the memory that a rank reports; ``base`` is None if it was not measured."""
        self._held[rank] = held
        if base is not None:
            self._base[rank] = base

    def ended(self, rank: int) -> None:
        """Forget a rank that has ended; all its memory is free."""
        for known in (self._base, self._held):
            known.pop(rank, None)
        self._out.discard(rank)
        self._leaving.discard(rank)

    def pressed(self, rank: int, base: int) -> None:
        """Note that ``rank`` has written its tensors out and still holds ``base`` bytes."""
        self._leaving.discard(rank)
        self._out.add(rank)
        self._base[rank] = base
        self.presses += 1

    def enter(self, rank: int, suspended: Iterable[int]) -> list[int] | None:
        """Let ``rank`` run with its memory, if there is room.

        Args:
            rank: the rank that is to go on.
            suspended: ranks that may be written out, in this order.

        Returns:
            None where ``rank`` may go on. Otherwise the ranks that must be written out first; ask
            again when they are. The list is empty while earlier ones are still being written out.

        Raises:
            UsageError: there is not enough room, even if all of them are written out.
        """
        if self._leaving:
            return []
        needed = self._taken_with(rank) - self._budget
        if needed <= 0:
            self._out.discard(rank)
            return None
        chosen = []
        for other in suspended:
            if needed > 0 and other != rank and self._held.get(other) and other not in self._out:
                chosen.append(other)
                needed -= self._held[other]
        if needed > 0:
            without, least = sum(self._base.values()), self._budget + needed
            raise UsageError(
                f"--memory {_gib(self._budget)} is too little: the command takes "
                f"{_gib(self._besides)}, {len(self._base)} ranks {_gib(without)} without their "
                f"tensors, and those that run at a time {_gib(least - without - self._besides)} "
                f"for theirs; give {_gib(least)} or more, fewer --slots, or leave it out"
            )
        self._leaving.update(chosen)
        return chosen

    def _taken_with(self, rank: int) -> int:
        held = sum(n for r, n in self._held.items() if r not in self._out or r == rank)
        taken = self._besides + sum(self._base.values()) + held
        if rank not in self._base:
            taken += max(self._base.values(), default=GUESS_BYTES)
        if rank not in self._held:
            taken += max(self._held.values(), default=0)
        return taken


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f}GiB"
