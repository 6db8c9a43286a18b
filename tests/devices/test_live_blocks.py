"""Live blocks: allocated memory by address, with frees that nobody reported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prismscale.devices.cpu import LiveBlocks


def test_allocations_add_up_and_frees_take_away() -> None:
    """Two blocks, one freed."""
    blocks = LiveBlocks()
    for address, n_bytes in ((0, 100), (100, 50), (0, -100)):
        blocks.change(address, n_bytes)
    assert blocks.allocated == 50


def test_a_block_whose_place_is_taken_again_was_free() -> None:
    """The second allocation lies over the end of the first, whose free was lost."""
    blocks = LiveBlocks()
    blocks.change(1000, 100)
    blocks.change(1080, 64)
    assert blocks.allocated == 64


def test_neighbours_are_not_taken_for_lost() -> None:
    """Blocks that touch do not overlap."""
    blocks = LiveBlocks()
    for address in (100, 0, 200, 50, 150):
        blocks.change(address, 50)
    assert blocks.allocated == 250


def test_a_free_of_memory_from_before_is_taken_off() -> None:
    """What was allocated before anything was followed counts from zero."""
    blocks = LiveBlocks()
    blocks.change(4096, -10)
    assert blocks.allocated == -10


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=40))
def test_live_blocks_never_overlap(allocations: list[tuple[int, int]]) -> None:
    """Whatever was lost, what counts is what the last allocations cover without overlap."""
    blocks = LiveBlocks()
    alive: list[tuple[int, int]] = []
    for address, n_bytes in allocations:
        blocks.change(address, n_bytes)
        end = address + n_bytes
        alive = [(a, n) for a, n in alive if a + n <= address or a >= end]
        alive.append((address, n_bytes))
    assert blocks.allocated == sum(n for _, n in alive)
