"""Private pools of the allocator model: random programs against the plain model, and MemPool."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.devices.null.memory.allocator_config import AllocatorConfig
from support.cpp_allocator import (
    CONFIGS,
    MIB,
    SIZES,
    CppAllocator,
    assert_same_statistics,
    replay,
)
from support.private_pools import PoolingAllocator

POOL_IDS = st.integers(1, 3)
STREAMS = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 30), STREAMS),
        st.tuples(st.just("begin"), POOL_IDS, STREAMS),
        st.tuples(st.just("end"), POOL_IDS, st.just(0)),
        st.tuples(st.just("release"), POOL_IDS, st.just(0)),
        st.tuples(st.just("work"), st.just(0), STREAMS),
        st.tuples(st.just("wait"), STREAMS, STREAMS),
        st.tuples(st.just("synchronize"), st.just(0), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, CONFIGS, st.sampled_from([96 * MIB, 256 * MIB, 4096 * MIB]))
def test_pools_are_those_of_the_plain_model(steps, config, total_bytes) -> None:
    """Same addresses, same refusals, same statistics on random programs with captures."""
    python, cpp = PoolingAllocator(total_bytes, config), CppAllocator(total_bytes, config)
    expected = replay(python, steps, lambda block: block.address)
    actual = replay(cpp, steps, cpp.library.ps_replay_address)
    stats = cpp.stats()
    cpp.close()

    assert actual == expected
    assert_same_statistics(stats, python)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_expandable_pools_hold_no_less_than_is_allocated(steps) -> None:
    """With expandable segments pools fit what they fit without, and are given back as a whole."""
    growing = CppAllocator(8192 * MIB, AllocatorConfig(expandable_segments=True))
    fixed = CppAllocator(8192 * MIB, AllocatorConfig())
    both = [replay(allocator, steps, lambda _: 0) for allocator in (growing, fixed)]
    mine, theirs = growing.stats(), fixed.stats()
    growing.close()
    fixed.close()
    assert both[0] == both[1]
    assert mine["requested_bytes"]["all"]["current"] == theirs["requested_bytes"]["all"]["current"]
    assert mine["reserved_bytes"]["all"]["current"] >= mine["active_bytes"]["all"]["current"]


@pytest.fixture(autouse=True)
def nothing_held() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def reserved() -> int:
    return torch.cuda.memory_reserved()


def test_a_mem_pool_keeps_its_memory_to_itself() -> None:
    """What is freed in it serves only what is allocated in it, and goes with it."""
    before, pool = reserved(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        assert pool.use_count() == 2
    address = tensor.data_ptr()
    del tensor
    other = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert other.data_ptr() != address
    with torch.cuda.use_mem_pool(pool):
        again = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert again.data_ptr() == address
    assert [s["segment_pool_id"] for s in pool.snapshot()] == [pool.id]
    assert reserved() == before + 64 * MIB
    del again, other
    torch.cuda.empty_cache()
    assert reserved() == before + 32 * MIB
    del pool
    assert reserved() == before


def test_memory_of_a_mem_pool_outlives_it_while_tensors_do() -> None:
    """The pool goes when memory is given back after its last tensor."""
    before, pool = reserved(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    del pool
    assert reserved() == before + 32 * MIB
    del tensor
    assert reserved() == before + 32 * MIB
    torch.cuda.empty_cache()
    assert reserved() == before


def test_statistics_tell_pools_apart() -> None:
    """By the pool's id, also when it is gone; since torch 2.13."""
    if "reserved_bytes_by_private_pools" not in (torch.cuda.memory_stats.__doc__ or ""):
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    key = "reserved_bytes_by_private_pools.{}_{}.all.{}".format(*pool.id, "{}")
    stats = torch.cuda.memory_stats()
    assert stats[key.format("current")] == 32 * MIB
    del tensor, pool
    stats = torch.cuda.memory_stats()
    assert (stats[key.format("current")], stats[key.format("peak")]) == (0, 32 * MIB)
