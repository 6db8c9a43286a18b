"""The allocator model: rules one by one, and the C++ model against the Python one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.devices.null.memory.allocator_config import AllocatorConfig, parse_config
from prismscale.errors import UsageError
from support.allocator import CachingAllocator
from support.cpp_allocator import CONFIGS, MIB, SIZES, CppAllocator, assert_same_statistics, replay

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 30), st.integers(0, 2)),
        st.tuples(st.just("synchronize"), st.just(0), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(STEPS, CONFIGS, st.sampled_from([96 * MIB, 256 * MIB, 4096 * MIB]))
def test_cpp_and_python_models_agree(steps, config, total_bytes) -> None:
    """Same addresses, same out-of-memory points, same statistics on random programs."""
    # The C++ model looks for finished streams when it allocates; so must this one.
    look = ("malloc", 512, 0)
    steps = [s for step in steps for s in ([step, look] if step[0] == "synchronize" else [step])]
    python, cpp = CachingAllocator(total_bytes, config=config), CppAllocator(total_bytes, config)
    expected = replay(python, steps, lambda block: block.address)
    actual = replay(cpp, steps, cpp.library.ps_replay_address)
    stats = cpp.stats()
    cpp.close()

    assert actual == expected
    assert_same_statistics(stats, python)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_expandable_segments_reserve_no_more_than_their_pages(steps) -> None:
    """With expandable segments everything fits that fits without, in at most as many bytes."""
    fixed = CppAllocator(8192 * MIB, AllocatorConfig())
    growing = CppAllocator(8192 * MIB, AllocatorConfig(expandable_segments=True))
    assert replay(fixed, steps, lambda _: 0) == replay(growing, steps, lambda _: 0)
    mine, theirs = growing.stats(), fixed.stats()
    fixed.close()
    growing.close()

    assert mine["allocated_bytes"]["all"]["current"] <= theirs["allocated_bytes"]["all"]["current"]
    assert mine["reserved_bytes"]["all"]["current"] >= mine["active_bytes"]["all"]["current"]
    assert mine["requested_bytes"] == theirs["requested_bytes"]


@settings(max_examples=60, deadline=None)
@given(
    STEPS,
    st.sampled_from([{"max_split_bytes": 40 * MIB}, {"garbage_collection_threshold": 0.2}]),
    st.sampled_from([96 * MIB, 256 * MIB]),
)
def test_expandable_segments_are_given_back_page_by_page(steps, more, total_bytes) -> None:
    """Also where oversized and old segments are released when memory runs short."""
    growing = CppAllocator(total_bytes, AllocatorConfig(expandable_segments=True, **more))
    replay(growing, [*steps, ("malloc", 60 * MIB, 0), ("empty", 0, 0)], lambda _: 0)
    stats = growing.stats()
    growing.close()

    reserved = stats["reserved_bytes"]["all"]["current"]
    assert stats["active_bytes"]["all"]["current"] <= reserved <= total_bytes
    assert stats["segment"]["all"]["current"] >= 0


def test_an_oversized_expandable_block_is_not_freed_as_a_segment() -> None:
    """Its neighbours are of the same range of addresses."""
    config = AllocatorConfig(expandable_segments=True, max_split_bytes=128 * MIB)
    growing = CppAllocator(80 << 30, config)
    first, second = growing.malloc(30 << 30, 0), growing.malloc(30 << 30, 0)
    growing.free(first)
    growing.malloc(40 << 30, 0)
    growing.free(second)
    stats = growing.stats()
    growing.close()

    assert stats["segment"]["all"]["current"] == 0
    assert stats["allocated_bytes"]["all"]["current"] == 40 << 30


def test_requests_are_rounded_to_512_bytes() -> None:
    """One byte costs a 512-byte block in a 2 MiB segment."""
    allocator = CachingAllocator(80 << 30)
    allocator.malloc(1)
    stats = allocator.memory_stats()

    assert stats["allocated_bytes.all.current"] == 512
    assert stats["requested_bytes.all.current"] == 1
    assert stats["reserved_bytes.small_pool.current"] == 2 * MIB
    assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 512


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segment_size_follows_the_request(size: int, reserved: int) -> None:
    """2 MiB up to 1 MiB, 20 MiB below 10 MiB, then the request rounded to 2 MiB."""
    allocator = CachingAllocator(80 << 30)
    allocator.malloc(size)

    assert allocator.memory_stats()["reserved_bytes.all.current"] == reserved


def test_a_block_used_on_another_stream_is_not_reused_at_once() -> None:
    """After record_stream a freed block stays active until the other stream is done."""
    allocator = CachingAllocator(80 << 30)
    block = allocator.malloc(MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    waiting = allocator.memory_stats()["active_bytes.all.current"]
    allocator.synchronize()

    assert waiting == MIB
    assert allocator.memory_stats()["active_bytes.all.current"] == 0


def test_cached_segments_are_given_back_before_out_of_memory() -> None:
    """A request that fits only without the cache succeeds after one retry."""
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)

    assert allocator.num_alloc_retries == 1
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 80 * MIB


@pytest.mark.parametrize(("threshold", "reserved"), [(0.0, 80 * MIB), (0.5, 40 * MIB)])
def test_cached_segments_go_when_more_than_the_threshold_is_reserved(threshold, reserved) -> None:
    """Garbage collection comes before a new segment, not before out of memory."""
    config = AllocatorConfig(memory_fraction=1.0, garbage_collection_threshold=threshold)
    allocator = CppAllocator(100 * MIB, config)
    allocator.free(allocator.malloc(40 * MIB, 0))
    for _ in range(2):
        allocator.malloc(20 * MIB, 1)
    found = allocator.stats()["reserved_bytes"]["all"]["current"]
    allocator.close()

    assert found == reserved


def test_config_is_read_as_torch_reads_it() -> None:
    """Settings of PYTORCH_ALLOC_CONF, in torch's units and syntax."""
    config = parse_config("max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8]")

    assert config.max_split_bytes == 128 * MIB
    assert config.roundup_power2_divisions == (1,) * 9 + (2,) + (8,) * 6
    assert parse_config("expandable_segments:True").expandable_segments


def test_an_unknown_setting_is_named() -> None:
    """A misspelt setting is refused with the one that was meant."""
    with pytest.raises(UsageError, match="did you mean max_split_size_mb"):
        parse_config("max_split_size:128")
