"""Private pools of the allocator model: ids, ``torch.cuda.MemPool`` and what routes to them.

An id is ``(n, 0)`` for the pool of a graph that names none, ``(0, n)`` for one that a program asks
for. Who holds a pool, and when its memory is given back: ``csrc/caching_allocator_pools.cpp``.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

PoolId = tuple[int, int]
_own_ids, _user_ids = count(1), count(1)


def own_pool_id() -> PoolId:
    """The pool of one graph."""
    return (next(_own_ids), 0)


def user_pool_id() -> PoolId:
    """``torch.cuda.graph_pool_handle()``: a pool that graphs may share."""
    return (0, next(_user_ids))


def succeed(answer: int, name: str, pool: PoolId) -> None:
    """Raise where the allocator would have: ``name`` met a pool in the wrong state."""
    if not answer:
        raise RuntimeError(
            f"{name}: the pool {tuple(pool)} is not in a state for this: not there, already "
            "recorded to, or no longer held by any graph"
        )


class PoolFunctions:
    """The functions of ``torch._C`` that route allocations to pools."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def begin(self, device: int, pool: PoolId) -> None:
        """All allocations, of whatever thread and stream."""
        self._begin(device, pool, thread=-1, stream=-1)

    def begin_thread(self, device: int, pool: PoolId) -> None:
        """Allocations of this thread."""
        self._begin(device, pool, thread=0, stream=-1)

    def begin_stream(self, device: int, pool: PoolId) -> None:
        """Allocations on the current stream."""
        self._begin(device, pool, thread=-1, stream=self._library.ps_current_stream(device))

    def end(self, device: int, pool: PoolId) -> None:
        """None any more."""
        succeed(self._library.ps_pool_end(device, *pool), "endAllocateToPool", pool)

    def release(self, device: int, pool: PoolId) -> None:
        """One who held it lets go."""
        succeed(self._library.ps_pool_release(device, *pool), "releasePool", pool)

    def table(self) -> dict[str, Any]:
        """By name in ``torch._C``."""
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
    """What ``torch._C._MemPool`` is on a CUDA build: a pool that lives as long as the object."""

    class NullMemPool:
        def __init__(
            self,
            allocator: Any = None,
            is_user_created: bool = True,
            use_on_oom: bool = False,
            no_split: bool = False,
        ) -> None:
            self.allocator = allocator  # whatever it would call, the model knows no other
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
