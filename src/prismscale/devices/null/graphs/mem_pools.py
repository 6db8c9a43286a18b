"""Private pools of the allocator model: ids, ``torch.cuda.MemPool``, routing of allocations.

An id is ``(n, 0)`` for the own pool of a graph that was given none, and ``(0, n)`` for a pool that
the program asked for. ``csrc/caching_allocator_pools.cpp`` says who holds a pool and when its
memory is released.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

PoolId = tuple[int, int]
_own_ids, _user_ids = count(1), count(1)


def own_pool_id() -> PoolId:
    """Return a new id for the own pool of one graph."""
    return (next(_own_ids), 0)


def user_pool_id() -> PoolId:
    """Return a new id for a pool that graphs may share: ``torch.cuda.graph_pool_handle()``."""
    return (0, next(_user_ids))


def succeed(answer: int, name: str, pool: PoolId) -> None:
    """Raise RuntimeError if ``answer`` is 0: the call ``name`` met a pool in a wrong state."""
    if not answer:
        raise RuntimeError(
            f"{name}: the pool {tuple(pool)} is not in a state for this: not there, already "
            "recorded to, or no longer held by any graph"
        )


class PoolFunctions:
    """Implementations of the functions of ``torch._C`` that route allocations to pools."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def begin(self, device: int, pool: PoolId) -> None:
        """Route the allocations of all threads and streams to ``pool``."""
        self._begin(device, pool, thread=-1, stream=-1)

    def begin_thread(self, device: int, pool: PoolId) -> None:
        """Route the allocations of this thread to ``pool``."""
        self._begin(device, pool, thread=0, stream=-1)

    def begin_stream(self, device: int, pool: PoolId) -> None:
        """Route the allocations on the current stream to ``pool``."""
        self._begin(device, pool, thread=-1, stream=self._library.ps_current_stream(device))

    def end(self, device: int, pool: PoolId) -> None:
        """End the routing of allocations to ``pool``."""
        succeed(self._library.ps_pool_end(device, *pool), "endAllocateToPool", pool)

    def release(self, device: int, pool: PoolId) -> None:
        """Remove one holder of ``pool``."""
        succeed(self._library.ps_pool_release(device, *pool), "releasePool", pool)

    def table(self) -> dict[str, Any]:
        """Return the functions by their names in ``torch._C``."""
        return {
            "_cuda_beginAllocateToPool": self.begin,
            "_cuda_beginAllocateCurrentThreadToPool": self.begin_thread,
            "_cuda_beginAllocateCurrentStreamToPool": self.begin_stream,
            "_cuda_endAllocateToPool": self.end,
            "_cuda_releasePool": self.release,
        }

    def _begin(self, device: int, pool: PoolId, *, thread: int, stream: int) -> None:
        begun = self._library.ps_pool_begin(device, *pool, thread, stream)
        succeed(begun, "beginAllocateToPool", pool)


def mem_pool_class(library: ctypes.PyDLL) -> type[Any]:
    """Return the replacement of ``torch._C._MemPool``: a pool that lives as long as the object."""

    class NullMemPool:
        def __init__(
            self,
            allocator: Any = None,
            is_user_created: bool = True,
            use_on_oom: bool = False,
            no_split: bool = False,
        ) -> None:
            self.allocator = allocator  # kept, but never called: the model has one allocator
            self.device = int(library.ps_current_device())
            self._id = user_pool_id() if is_user_created else own_pool_id()
            library.ps_pool_retain(self.device, *self._id)
            library.ps_pool_options(self.device, *self._id, use_on_oom, no_split)

        @property
        def id(self) -> PoolId:
            return self._id

        def use_count(self) -> int:
            return int(library.ps_pool_use_count(self.device, *self._id))

        def __del__(self) -> None:
            library.ps_pool_release(self.device, *self._id)
            library.ps_empty_cache(self.device, *self._id)

    return NullMemPool
