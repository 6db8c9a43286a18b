"""The CUDA caching allocator in plain Python: the documented model of a program's memory.

The rules are those of ``c10/cuda/CUDACachingAllocator`` (torch 2.13):

1. A request is rounded up to 512 bytes. Up to 1 MiB it comes from the *small* pool, whose segments
   are 2 MiB; above from the *large* pool: 20 MiB segments below 10 MiB, else a segment of the
   request's own size rounded to 2 MiB.
2. A stream reuses only blocks of its own. Among its cached blocks the smallest that fits is taken,
   at equal size the one at the lowest address.
3. A block is split when what remains is at least 512 bytes (small pool, expandable segments), or
   more than 1 MiB (large pool, request below ``max_split_size``).
4. A freed block joins its free neighbours in the segment. One that other streams used
   (``record_stream``) becomes free when their work up to the free is done.
5. Without a fitting block a segment is taken from the device; where that fails, all unsplit cached
   segments are given back, and it is tried once more; then the program is out of memory.

:class:`CachingAllocator` replays a list of allocations and frees and reports what
``torch.cuda.memory_stats`` would. The null device carries the same model in C++; tests hold the two
to equal answers. Expandable segments and garbage collection exist only there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from prismscale.devices.null.memory.allocator_config import MIB, AllocatorConfig
from prismscale.errors import PrismscaleError, UsageError

MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_LIMIT_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB
FIRST_ADDRESS = 1 << 45

METRICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")


class OutOfMemory(PrismscaleError):
    """The replayed program would have met ``torch.OutOfMemoryError`` here."""


@dataclass(slots=True)
class Stat:
    """One figure of ``memory_stats``: now, highest, sum of increases, sum of decreases."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        if amount >= 0:
            self.current += amount
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.current += amount
            self.freed -= amount


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use, cached, or waiting for other streams."""

    stream: int
    size: int
    address: int
    small: bool
    prev: Block | None = None
    next: Block | None = None
    requested: int = 0
    allocated: bool = False
    pending: int = 0
    used_on: set[int] = field(default_factory=set)

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def is_idle(self) -> bool:
        return not self.allocated and self.pending == 0 and not self.used_on


@dataclass(slots=True)
class _Pool:
    """Cached blocks, ordered by (stream, size, address)."""

    keys: list[tuple[int, int, int]] = field(default_factory=list)
    by_key: dict[tuple[int, int, int], Block] = field(default_factory=dict)

    def insert(self, block: Block) -> None:
        key = (block.stream, block.size, block.address)
        insort(self.keys, key)
        self.by_key[key] = block

    def remove(self, block: Block) -> None:
        key = (block.stream, block.size, block.address)
        del self.keys[bisect_left(self.keys, key)]
        del self.by_key[key]

    def best_fit(self, stream: int, size: int) -> Block | None:
        at = bisect_left(self.keys, (stream, size, 0))
        if at == len(self.keys) or self.keys[at][0] != stream:
            return None
        return self.by_key[self.keys[at]]


class CachingAllocator:
    """Replays allocations on a device of ``total_bytes``; others hold ``outside_bytes`` of it."""

    def __init__(
        self, total_bytes: int, *, outside_bytes: int = 0, config: AllocatorConfig | None = None
    ) -> None:
        self.config = config or AllocatorConfig()
        if self.config.expandable_segments or self.config.garbage_collection_threshold:
            raise UsageError(
                "the Python allocator model has neither expandable segments nor garbage "
                "collection; replay this configuration on the null device"
            )
        self.total_bytes = total_bytes
        self.outside_bytes = outside_bytes
        self.stats = {metric: {pool: Stat() for pool in POOLS} for metric in METRICS}
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._pending: list[tuple[int, Block]] = []
        self._next_address = FIRST_ADDRESS

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """A block for ``requested`` bytes on ``stream``; raises OutOfMemory after all retries."""
        size = self._round(requested)
        small = size <= SMALL_LIMIT_BYTES
        block = self._take_cached(size, stream, small) or self._take_segment(size, stream, small)
        if block is None and self._release_oversized(size, stream, small):
            block = self._take_segment(size, stream, small)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._take_segment(size, stream, small)
        if block is None:
            self.num_ooms += 1
            raise OutOfMemory(
                f"out of memory: {requested} bytes asked for, "
                f"{self._current('allocated_bytes')} allocated, "
                f"{self._current('reserved_bytes')} reserved of {self.total_bytes}"
            )
        return self._hand_out(block, size, requested)

    def free(self, block: Block) -> None:
        """Give a block back; it is cached, or waits for the streams that used it."""
        block.allocated = False
        self._count(block.small, allocation=-1, allocated_bytes=-block.size)
        if not block.used_on:
            self._make_idle(block)
            return
        for stream in sorted(block.used_on):
            block.pending += 1
            self._pending.append((stream, block))
        block.used_on.clear()

    def record_stream(self, block: Block, stream: int) -> None:
        """``block`` is used on another stream than the one it was allocated on."""
        if stream != block.stream:
            block.used_on.add(stream)

    def synchronize(self) -> None:
        """All streams have done what was enqueued up to now."""
        pending, self._pending = self._pending, []
        # By stream, and within one in the order of the frees: what merges first shows in peaks.
        for _, block in sorted(pending, key=lambda entry: entry[0]):
            block.pending -= 1
            if block.pending == 0:
                self._make_idle(block)

    def empty_cache(self) -> None:
        """Wait for all streams and give every unsplit cached segment back to the device."""
        self.synchronize()
        for pool in self._pools.values():
            for block in list(pool.by_key.values()):
                if not block.is_split:
                    self._release(block)

    def reset_peak_memory_stats(self) -> None:
        for by_pool in self.stats.values():
            for stat in by_pool.values():
                stat.peak = stat.current

    def memory_stats(self) -> dict[str, int]:
        """Flat figures by the names of ``torch.cuda.memory_stats``, where this model has them."""
        flat = {
            f"{metric}.{pool}.{name}": int(getattr(stat, name))
            for metric, by_pool in self.stats.items()
            for pool, stat in by_pool.items()
            for name in ("current", "peak", "allocated", "freed")
        }
        return flat | {"num_alloc_retries": self.num_alloc_retries, "num_ooms": self.num_ooms}

    def _round(self, requested: int) -> int:
        if requested < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        if self.config.roundup_power2_divisions:
            log2 = requested.bit_length() - 1
            divisions = self.config.roundup_power2_divisions[min(max(log2 - 20, 0), 15)]
            if divisions > 1 and requested > MIN_BLOCK_BYTES * divisions:
                return _round_up(requested, (1 << log2) // divisions)
        return _round_up(requested, MIN_BLOCK_BYTES)

    def _segment_bytes(self, size: int) -> int:
        if size <= SMALL_LIMIT_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < LARGE_LIMIT_BYTES:
            return self.config.large_segment_bytes
        return _round_up(size, ROUND_LARGE_BYTES)

    def _take_cached(self, size: int, stream: int, small: bool) -> Block | None:
        block = self._pools[small].best_fit(stream, size)
        limit = self.config.max_split_bytes
        if block is None:
            return None
        if limit and size < limit <= block.size:
            return None
        slack = self.config.max_non_split_rounding_bytes
        if limit and size >= limit and block.size >= size + slack:
            return None
        self._pools[small].remove(block)
        return block

    def _take_segment(self, size: int, stream: int, small: bool) -> Block | None:
        wanted = self._segment_bytes(size)
        reserved = self._current("reserved_bytes")
        fraction = self.config.memory_fraction
        if fraction and reserved + wanted > int(fraction * self.total_bytes):
            return None
        if wanted > self.total_bytes - self.outside_bytes - reserved:
            return None
        block = Block(stream=stream, size=wanted, address=self._next_address, small=small)
        self._next_address += _round_up(wanted, ROUND_LARGE_BYTES)
        self._count(small, segment=1, reserved_bytes=wanted)
        return block

    def _hand_out(self, block: Block, size: int, requested: int) -> Block:
        rest_bytes = block.size - size
        was_split = block.is_split
        limit = self.config.max_split_bytes
        splits = (
            rest_bytes >= MIN_BLOCK_BYTES
            if block.small
            else (not limit or size < limit) and rest_bytes > SMALL_LIMIT_BYTES
        )
        if splits:
            rest = Block(
                stream=block.stream,
                size=rest_bytes,
                address=block.address + size,
                small=block.small,
                prev=block,
                next=block.next,
            )
            if rest.next is not None:
                rest.next.prev = rest
            block.next, block.size = rest, size
            self._pools[block.small].insert(rest)
            if was_split:
                self._count(block.small, inactive_split_bytes=-size)
            else:
                self._count(block.small, inactive_split=1, inactive_split_bytes=rest_bytes)
        elif was_split:
            self._count(block.small, inactive_split=-1, inactive_split_bytes=-block.size)
        block.allocated, block.requested = True, requested
        self._count(
            block.small,
            allocation=1,
            allocated_bytes=block.size,
            active=1,
            active_bytes=block.size,
            requested_bytes=requested,
        )
        return block

    def _make_idle(self, block: Block) -> None:
        size, requested = block.size, block.requested
        split_blocks = split_bytes = 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.is_idle:
                split_blocks -= 1
                split_bytes -= neighbour.size
                self._merge(block, neighbour)
        self._pools[block.small].insert(block)
        if block.is_split:
            split_blocks += 1
            split_bytes += block.size
        self._count(
            block.small,
            inactive_split=split_blocks,
            inactive_split_bytes=split_bytes,
            active=-1,
            active_bytes=-size,
            requested_bytes=-requested,
        )

    def _merge(self, block: Block, neighbour: Block) -> None:
        self._pools[block.small].remove(neighbour)
        if neighbour is block.prev:
            block.address, block.prev = neighbour.address, neighbour.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.prev = block
        block.size += neighbour.size

    def _release(self, block: Block) -> None:
        self._pools[block.small].remove(block)
        self._count(block.small, segment=-1, reserved_bytes=-block.size)

    def _release_oversized(self, size: int, stream: int, small: bool) -> bool:
        """With ``max_split_size``: give back one oversized segment that fits, or several."""
        limit = self.config.max_split_bytes
        if not limit:
            return False
        pool = self._pools[small]
        wanted = max(size, limit)
        fitting = pool.best_fit(stream, wanted)
        if fitting is not None:
            self._release(fitting)
            return True
        released = 0
        at = bisect_left(pool.keys, (stream, wanted, 0)) - 1
        while at >= 0 and released < wanted:
            block = pool.by_key[pool.keys[at]]
            if block.size < limit or block.stream != stream:
                break
            released += block.size
            self._release(block)
            at -= 1
        return released >= wanted

    def _count(self, small: bool, **changes: int) -> None:
        pool = "small_pool" if small else "large_pool"
        for metric, amount in changes.items():
            self.stats[metric]["all"].add(amount)
            self.stats[metric][pool].add(amount)

    def _current(self, metric: str) -> int:
        return self.stats[metric]["all"].current


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
