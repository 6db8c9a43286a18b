"""Whose memory is pressed out, so that the ranks of a job stay within a budget."""

from __future__ import annotations

from collections.abc import Iterable

from prismscale.errors import UsageError

GUESS_BYTES = 256 << 20
"""What a rank takes of which nothing is known yet."""


class MemoryBudget:
    """What the processes of all ranks take together, by their own word."""

    def __init__(self, budget_bytes: int, *, besides_bytes: int = 0) -> None:
        """
        Args:
            budget_bytes: of all ranks and what runs besides.
            besides_bytes: what runs besides takes: the command itself.
        """
        self._budget = budget_bytes
        self._besides = besides_bytes
        self._base: dict[int, int] = {}
        """By rank: what cannot be pressed out."""
        self._held: dict[int, int] = {}
        """By rank: what its tensors take, unless they are pressed out."""
        self._out: set[int] = set()
        self._leaving: set[int] = set()
        self.presses = 0
        """How often a rank was pressed out."""

    def told(self, rank: int, held: int, base: int | None) -> None:
        """What a rank says of itself; ``base`` only where it has looked."""
        self._held[rank] = held
        if base is not None:
            self._base[rank] = base

    def ended(self, rank: int) -> None:
        """All of it is free."""
        for known in (self._base, self._held):
            known.pop(rank, None)
        self._out.discard(rank)
        self._leaving.discard(rank)

    def pressed(self, rank: int, base: int) -> None:
        """``rank`` has given its memory back, and takes ``base`` without."""
        self._leaving.discard(rank)
        self._out.add(rank)
        self._base[rank] = base
        self.presses += 1

    def enter(self, rank: int, suspended: Iterable[int]) -> list[int] | None:
        """Let ``rank`` run with its memory, if there is room.

        Args:
            rank: who is to go on.
            suspended: who may be pressed out, in the order in which they should be.

        Returns:
            Ranks that must be pressed out first, and ask again when they are (none: some are being
            pressed out already); None where ``rank`` may go on.

        Raises:
            UsageError: there is no room, whoever is pressed out.
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
