"""What is counted while a kernel is followed, and by whom: one kernel at a time in each thread."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

ELSEWHERE = -1
"""The place of memory that a kernel has the addresses of, and not the tensor."""
MOST_STEPS = 200_000
"""Operations after which a kernel is given up: a tenth of a second or two."""
WINDOW = 8
"""Turns of a loop that are compared: one that does the same in two windows, after a first one, does
so in all that are left."""
EXPONENTIAL_STEPS = 40
"""Inner steps of a product that the exponential of one of its results costs: twice what attention
by FlashAttention 2 loses to its softmax (``head_overhead`` of an A100 is 23, of an H100 19), which
stands between two products."""


def triton_language() -> Any:
    """``triton.language``, which programs without Triton never import."""
    import triton.language

    return triton.language


class UnreadableKernelError(Exception):
    """A kernel whose work does not follow from shapes and integers; says why."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Of the programs of one launch that were followed."""

    grid: tuple[int, ...] = (1, 1, 1)
    program: tuple[int, ...] = (0, 0, 0)
    """The one that is followed."""
    held: Callable[[int, int], int | None] = lambda tensor, at: None
    """What a tensor of integers holds at a place, where that is known."""

    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Inner steps, by rows and columns of a tile and by the bits of its factors."""
    read_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By the place of the tensor among the launch's arguments."""
    written_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    kinds: set[str] = field(default_factory=set)
    """Of kernels that do what it does beside pointwise work: ``reduction``, ``index``, …"""
    reads_values: bool = False
    """What it does may depend on what a tensor holds."""
    steps: int = 0

    def step(self) -> None:
        """One operation more.

        Raises:
            UnreadableKernelError: too many.
        """
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise UnreadableKernelError(f"it takes more than {MOST_STEPS:,} operations")

    def counts(self) -> Counter[tuple[str, Any]]:
        """All that is counted, by what it is."""
        found: Counter[tuple[str, Any]] = Counter()
        for name in ("products", "read_bytes", "written_bytes"):
            found.update({(name, key): count for key, count in getattr(self, name).items()})
        return found

    def add(self, counts: Mapping[tuple[str, Any], int], times: int) -> None:
        """The same again, some times over."""
        for (name, key), count in counts.items():
            getattr(self, name)[key] += count * times

    def product(self, shape: tuple[int, ...], inner: int, bits: int) -> None:
        """A product of matrices, or several."""
        *batch, rows, columns = shape
        self.products[rows, columns, bits] += math.prod(batch) * inner

    def exponential(self, shape: tuple[int, ...]) -> None:
        """Of every element; of matrices alone, which products have made."""
        for tile in [tile for tile in self.products if tile[:2] == shape[-2:]]:
            self.products[tile] += EXPONENTIAL_STEPS


_FOLLOWED: ContextVar[Tally] = ContextVar("prismscale_followed_kernel")


def tally() -> Tally:
    """Of the kernel that is being followed."""
    return _FOLLOWED.get()


@contextmanager
def counted_in(found: Tally) -> Iterator[None]:
    """What is followed meanwhile goes into ``found``."""
    token = _FOLLOWED.set(found)
    try:
        yield
    finally:
        _FOLLOWED.reset(token)


def turns(bounds: Sequence[int]) -> Iterator[int]:
    """The turns of a loop: all of them, or the first ones and then as many times what each did."""
    count, every = tally(), range(*bounds)
    before = last = Counter[tuple[str, Any]]()
    for turn, index in enumerate(every):
        if turn and turn % WINDOW == 0 and turn <= 3 * WINDOW:
            now = count.counts()
            done, before = now - before, now
            if turn == 3 * WINDOW and done == last and len(every) > turn:
                _add_turns(count, done, len(every) - turn)
                return
            last = done
        count.step()
        yield index


def _add_turns(count: Tally, window: Counter[tuple[str, Any]], left: int) -> None:
    whole, rest = divmod(left, WINDOW)
    count.add(window, whole)
    count.add({key: n * rest // WINDOW for key, n in window.items()}, 1)
