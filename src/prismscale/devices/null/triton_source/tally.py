"""Counts of a kernel that is being traced; each thread traces one kernel at a time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

ELSEWHERE = -1
"""Place of memory for which a kernel has only addresses, not the tensor."""
MOST_STEPS = 200_000
"""Operations after which a kernel is given up, which takes 0.1 to 0.2 s."""
WINDOW = 8
"""Iterations of a loop in one window. If two consecutive windows after the first do the same work,
all remaining iterations are assumed to do so too."""
EXPONENTIAL_STEPS = 40
"""Cost of the exponential of one result of a product, in inner steps of the product. It is twice
what attention by FlashAttention 2 loses to its softmax, which stands between two products
(``head_overhead`` is 23 on an A100, 19 on an H100)."""


def triton_language() -> Any:
    """Import and return ``triton.language``; programs without Triton never need it."""
    import triton.language

    return triton.language


class UnreadableKernelError(Exception):
    """A kernel's work does not follow from shapes and integers; the message says why."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts over the traced programs of one launch."""

    grid: tuple[int, ...] = (1, 1, 1)
    program: tuple[int, ...] = (0, 0, 0)
    """Ids of the program that is being traced."""
    held: Callable[[int, int], int | None] = lambda tensor, at: None
    """Returns the element of a tensor of integers at an index, if it is known."""

    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Inner steps of products, by rows and columns of the tile and bits of the factors."""
    read_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes by the place of the tensor among the launch's tensors."""
    written_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    kinds: set[str] = field(default_factory=set)
    """Kinds of the kernel's operations beside pointwise ones: ``reduction``, ``index``, …"""
    reads_values: bool = False
    """Whether the kernel's work may depend on the content of a tensor."""
    steps: int = 0

    def step(self) -> None:
        """Count one operation.

        Raises:
            UnreadableKernelError: the kernel takes too many operations.
        """
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise UnreadableKernelError(f"it takes more than {MOST_STEPS:,} operations")

    def counts(self) -> Counter[tuple[str, Any]]:
        """Return all counts, by the field's name and its key."""
        found: Counter[tuple[str, Any]] = Counter()
        for name in ("products", "read_bytes", "written_bytes"):
            found.update({(name, key): count for key, count in getattr(self, name).items()})
        return found

    def add(self, counts: Mapping[tuple[str, Any], int], times: int) -> None:
        """Add ``counts``, multiplied by ``times``."""
        for (name, key), count in counts.items():
            getattr(self, name)[key] += count * times

    def product(self, shape: tuple[int, ...], inner: int, bits: int) -> None:
        """Count a matrix product, or a batch of them."""
        *batch, rows, columns = shape
        self.products[rows, columns, bits] += math.prod(batch) * inner

    def exponential(self, shape: tuple[int, ...]) -> None:
        """Count exponentials of all elements, if products have made matrices of this shape."""
        for tile in [tile for tile in self.products if tile[:2] == shape[-2:]]:
            self.products[tile] += math.prod(shape[:-2]) * EXPONENTIAL_STEPS


_FOLLOWED: ContextVar[Tally] = ContextVar("prismscale_followed_kernel")


def tally() -> Tally:
    """Return the tally of the kernel that this thread is tracing."""
    return _FOLLOWED.get()


@contextmanager
def counted_in(found: Tally) -> Iterator[None]:
    """Count what is traced in the block in ``found``."""
    token = _FOLLOWED.set(found)
    try:
        yield
    finally:
        _FOLLOWED.reset(token)


def turns(bounds: Sequence[int]) -> Iterator[int]:
    """Yield the iterations of a loop: all of them, or the first ones if the rest do the same work.

    The work of the iterations that are left out is counted as that of the last window.
    """
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
