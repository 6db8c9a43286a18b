"""Private pools of the CUDA caching allocator in plain Python.

Torch's rules (``c10/cuda/CUDACachingAllocator``, torch 2.15), on top of those in
:mod:`support.allocator`:

1. A private pool is a caching allocator of its own on the same device. What is allocated on a
   capturing stream comes from the pool of the capture; a block returns to the pool it came from.
2. A pool is held by every graph that was captured into it, from the beginning of the capture. One
   that nobody holds is *freeable*, and cannot be captured into again while it exists.
3. Freeable pools give back their unsplit cached segments when memory is given back, and are gone
   when no block of theirs is left. Pools that are held give back nothing.
4. During a capture no event is recorded or asked for. A block that is freed then, and was used on
   other streams, waits for the end of the capture; uses during the capture do not count.
   With ``graph_capture_record_stream_reuse`` it may end its wait earlier: when its own stream
   allocates, and the graph's last nodes of all streams that used it, as it was freed, come before
   what that stream does next. A stream without a node in the graph leaves it to the end.
5. During a capture memory is not given back to make room, and giving back by hand spares all
   but freeable pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prismscale.devices.null.memory.allocator_config import AllocatorConfig
from support.allocator import (
    FIRST_ADDRESS,
    SMALL_LIMIT_BYTES,
    Block,
    CachingAllocator,
    OutOfMemory,
)


class _Part(CachingAllocator):
    """The default pools, or a private one: figures and addresses are the device's."""

    def __init__(self, device: PoolingAllocator, total_bytes: int, config: AllocatorConfig):
        super().__init__(total_bytes, config=config)
        self._device = device
        self.stats = device.stats or self.stats
        self.use_count = 1
        self.n_segments = 0

    def _take_segment(self, size: int, stream: int, small: bool) -> Block | None:
        self._next_address = self._device.next_address
        block = super()._take_segment(size, stream, small)
        self._device.next_address = self._next_address
        self.n_segments += block is not None
        return block

    def _release(self, block: Block) -> None:
        super()._release(block)
        self.n_segments -= 1

    def find(self, size: int, stream: int) -> Block | None:
        """A cached block or a new segment."""
        small = size <= SMALL_LIMIT_BYTES
        block = self._take_cached(size, stream, small) or self._take_segment(size, stream, small)
        if block is None and self._release_oversized(size, stream, small):
            block = self._take_segment(size, stream, small)
        return block

    def again(self, size: int, stream: int) -> Block | None:
        """A new segment, now that memory was given back."""
        return self._take_segment(size, stream, size <= SMALL_LIMIT_BYTES)

    def give_back(self) -> None:
        """Unsplit cached segments."""
        for pool in self._pools.values():
            for block in list(pool.by_key.values()):
                if not block.is_split:
                    self._release(block)


@dataclass(eq=False)
class _Use:
    """A stream's use of a freed block that may be unfinished."""

    stream: int
    block: Block
    ticket: int


@dataclass
class PoolingAllocator:
    """Allocations on a device of ``total_bytes``, some of them for captures."""

    total_bytes: int
    config: AllocatorConfig
    stats: dict = field(default_factory=dict)
    next_address: int = FIRST_ADDRESS

    def __post_init__(self) -> None:
        self._default = _Part(self, self.total_bytes, self.config)
        self.stats = self._default.stats
        self._pools: dict[int, _Part] = {}
        self._routes: list[tuple[int, int]] = []
        self._owner: dict[Block, _Part] = {}
        self._captured_uses: dict[Block, set[int]] = {}
        self._deferred: list[tuple[Block, set[int]]] = []
        self._before: dict[int, set[int]] = {}
        self._n_nodes = 0
        self._uses: list[_Use] = []
        self._now = self._done = 0

    def begin_pool(self, pool: int, stream: int) -> bool:
        """A capture on ``stream`` begins; False where torch asserts."""
        if any(route[0] == pool for route in self._routes):
            return False
        part = self._pools.get(pool)
        if part is None:
            self._pools[pool] = _Part(self, self.total_bytes, self.config)
        elif part.use_count == 0:
            return False
        else:
            part.use_count += 1
        self._routes.append((pool, stream))
        return True

    def end_pool(self, pool: int) -> bool:
        """The capture ends; the graph holds its pool."""
        before = len(self._routes)
        self._routes = [route for route in self._routes if route[0] != pool]
        return len(self._routes) < before

    def release_pool(self, pool: int) -> bool:
        """A graph is destroyed."""
        part = self._pools.get(pool)
        if part is None or part.use_count == 0:
            return False
        part.use_count -= 1
        return True

    def work(self, stream: int) -> None:
        """A node of ``stream`` in the graph that is captured."""
        self._before.setdefault(stream, set()).add(self._n_nodes)
        self._n_nodes += 1

    def wait(self, stream: int, other: int) -> None:
        """What ``stream`` does next comes after all of ``other`` so far."""
        before = self._before.get(other, set())
        if before:
            self._before.setdefault(stream, set()).update(before)

    def malloc(self, requested: int, stream: int) -> Block:
        """A block for ``stream``; raises OutOfMemory."""
        if not self._routes:
            self._reclaim(everything=False)
        elif self.config.graph_capture_record_stream_reuse:
            self._reuse_in_capture(stream)
        latest = (pool for pool, routed in reversed(self._routes) if routed == stream)
        pool = next(latest, None)
        part = self._default if pool is None else self._pools[pool]
        size = part._round(requested)
        block = part.find(size, stream)
        if block is None and not self._routes:
            self.empty_cache()
            block = part.again(size, stream)
        if block is None:
            raise OutOfMemory("out of memory")
        block = part._hand_out(block, size, requested)
        self._owner[block] = part
        return block

    def free(self, block: Block) -> None:
        """Back to the pool that it came from, or wait."""
        block.allocated = False
        self._owner[block]._count(block.small, allocation=-1, allocated_bytes=-block.size)
        if not block.used_on:
            self._owner[block]._make_idle(block)
        elif self._routes:
            self._deferred.append((block, self._uses_of(block)))
        else:
            self._wait_for_uses(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """``block`` is used on another stream."""
        if stream != block.stream:
            block.used_on.add(stream)
            if self._routes:
                self._captured_uses.setdefault(block, set()).add(stream)

    def synchronize(self) -> None:
        """All that was issued is done; the next allocation outside captures notices."""
        self._now += 1
        self._done = self._now

    def empty_cache(self) -> None:
        """Give memory back."""
        if not self._routes:
            self._reclaim(everything=True)
            self._default.give_back()
        for pool, part in list(self._pools.items()):
            if part.use_count == 0:
                part.give_back()
                if part.n_segments == 0:
                    del self._pools[pool]

    def _wait_for_uses(self, block: Block) -> None:
        self._captured_uses.pop(block, None)
        for stream in sorted(block.used_on):
            block.pending += 1
            self._uses.append(_Use(stream, block, self._now))
        block.used_on.clear()

    def _uses_of(self, block: Block) -> set[int]:
        """Nodes that come before the end of all uses; empty where a stream has none."""
        uses = [self._before.get(stream, set()) for stream in (block.stream, *block.used_on)]
        return set().union(*uses) if all(uses) else set()

    def _reuse_in_capture(self, stream: int) -> None:
        before = self._before.get(stream, set())
        waiting, self._deferred = self._deferred, []
        for block, uses in waiting:
            if block.stream != stream or not uses or not uses <= before:
                self._deferred.append((block, uses))
                continue
            block.used_on.clear()
            self._captured_uses.pop(block, None)
            self._owner[block]._make_idle(block)

    def _reclaim(self, *, everything: bool) -> None:
        deferred, self._deferred = self._deferred, []
        for block, _ in deferred:
            block.used_on -= self._captured_uses.pop(block, set())
            self._wait_for_uses(block)
            if block.pending == 0:
                self._owner[block]._make_idle(block)
        # By stream, and within one in the order of the frees.
        for use in sorted(self._uses, key=lambda use: use.stream):
            if everything or use.ticket < self._done:
                self._uses.remove(use)
                use.block.pending -= 1
                if use.block.pending == 0:
                    self._owner[use.block]._make_idle(use.block)
