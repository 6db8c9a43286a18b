"""What communication takes from computation on the same processor.

On a GPU target the network's work is not the host's. On a CPU target gloo's threads copy, send and
reduce on the very cores that compute (a 2-rank DDP step of 92 ms computation costs 102 ms with 4 ms
of all-reduce), so a rank that runs alone must do its share of that work too.

[Note: a rank's share] In a ring over ``K`` members a rank sends and receives ``2 (K - 1) / K`` of
an all-reduced tensor and adds up half of that. Two gloo contexts inside this process that
all-reduce ``M`` bytes together send ``2 M`` and add up ``M``: with ``M = (K - 1) / K * bytes`` the
pair does, over the same sockets and in gloo's own threads, exactly the work of one rank. The other
collectives follow in the same way.

How long the pair took beside this program's computation is noted too: gloo's threads wait for a
core that computes (a 128 KiB all-reduce of 0.4 ms takes 1 to 2 ms under a backward pass), and no
calibration of communication alone knows that. Where the program waits for the pair, it is done when
the program runs again: on a busy core that is another wake-up.

[Note: what starting costs] gloo's threads that are woken at the issue of a communication run at
once, on the core of the thread that woke them: of 0.8 ms that starting the pair takes there, 0.12
to 0.18 ms are the starting thread's own, and a real enqueue takes as much. Both are the program's
time on the cluster, so they are here, in captures as in live ranks. A synchronous call waits from
its start on: there they lie within the communication.

[Note: the pair's buffers] gloo gathers into buffers from the program's own allocator, and those of
the pair are not the rank's (:mod:`prismscale.capture.workspace` has the rank's). So the pair works
only once the program's memory is no longer followed; steps before that are not timed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work

from prismscale.capture.hook import Collective
from prismscale.graph.node import CollectiveOp

SMALLEST_BYTES = 1024
"""Below this, handling the pair would cost more than the work it stands for."""
LARGEST_BYTES = 256 << 20
"""Scratch memory; larger communications do this much work."""


GLOO_THREADS = 2
"""Communications of one gloo group that run at a time."""
Took = Callable[[int], None]
"""Told, from a thread of the backend's, how many nanoseconds a communication's work took."""


class CommunicationLoad(Protocol):
    """Performs this rank's share of a communication's work on the local processor."""

    def begin(self, batch: Sequence[Collective], took: Took | None = None) -> Callable[[], None]:
        """Start the work in the background; the result waits for its end."""
        ...


class NullLoad:
    """Communication costs the local processor nothing."""

    def begin(self, batch: Sequence[Collective], took: Took | None = None) -> Callable[[], None]:
        """Nothing to do."""
        return nothing_to_wait_for


class LateLoad:
    """Costs nothing before :meth:`start`: see [Note: the pair's buffers]."""

    def __init__(self, load: CommunicationLoad) -> None:
        self._load = load
        self._now: CommunicationLoad = NullLoad()

    def start(self) -> None:
        """From now on each communication costs what it does; safe to call again."""
        self._now = self._load

    def begin(self, batch: Sequence[Collective], took: Took | None = None) -> Callable[[], None]:
        """As the load itself, once started."""
        return self._now.begin(batch, took)


class GlooLoad:
    """A pair of gloo contexts in this process that do one rank's share of the work."""

    def __init__(self) -> None:
        # Before the emulated group takes gloo's name.
        self._pair = _connect_pair(c10d.ProcessGroupGloo)
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._ended_ns: deque[int] = deque([0] * GLOO_THREADS, maxlen=GLOO_THREADS)

    def begin(self, batch: Sequence[Collective], took: Took | None = None) -> Callable[[], None]:
        """Start the pair's communication; waiting for it is waiting for gloo's threads."""
        began_ns = perf_counter_ns()
        works: list[Work] = []
        for collective in batch:
            works += self._start(collective)
        if not works:
            return nothing_to_wait_for
        if took is None:
            return lambda: _wait(works)
        return Transfer(works, began_ns, self._ended_ns, took).finish

    def _start(self, collective: Collective) -> list[Work]:
        size, op = collective.group.size, collective.op
        tensors = collective.inputs or collective.outputs
        if size < 2 or not tensors:
            return []
        share = (size - 1) / size
        if op.is_p2p:
            self._message(collective)
            return []
        if op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.GATHER):
            share = 0.5
        n_bytes = min(int(collective.n_bytes * share), LARGEST_BYTES)
        if n_bytes < SMALLEST_BYTES:
            return []
        n = n_bytes // tensors[0].element_size() // 2 * 2
        a, b = (t[:n] for t in self._tensors(tensors[0].dtype, n))
        first, second = self._pair
        if op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE, CollectiveOp.REDUCE_SCATTER):
            return [first.allreduce([a]), second.allreduce([b])]
        if op in (CollectiveOp.ALL_GATHER, CollectiveOp.ALL_TO_ALL):
            half = n // 2
            return [
                first._allgather_base(a, a[:half]),
                second._allgather_base(b, b[half:]),
            ]
        # The receiver first: what comes before it is asked for costs it twice.
        received = second.recv([b], 0, 0)
        return [first.send([a], 1, 0), received]

    def _message(self, collective: Collective) -> None:
        """gloo writes a message to the socket in the sender's own thread, and reads one while the
        receiver waits. A pair would do both here, at ten times the cost: its reader, on the
        sender's core, is woken for every segment."""
        if collective.op == CollectiveOp.SEND:
            sent = collective.inputs[0]
            n = min(sent.numel(), LARGEST_BYTES // sent.element_size())
            a, b = self._tensors(sent.dtype, n)
            b[:n].copy_(a[:n])

    def _tensors(self, dtype: torch.dtype, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two zeroed buffers: sums of zeros stay zero, so no value ever overflows.

        They are NumPy's memory, so that tracking torch's allocator does not see them.
        """
        held = self._scratch.get(dtype)
        if held is None or held[0].numel() < n:
            width = torch.empty(0, dtype=dtype).element_size()
            fresh = [
                torch.from_numpy(np.zeros(n * width, dtype=np.uint8)).view(dtype) for _ in range(2)
            ]
            held = (fresh[0], fresh[1])
            self._scratch[dtype] = held
        return held


class Transfer:
    """The pair at work on one batch; tells how long it took since a thread of gloo's was free."""

    def __init__(
        self, works: Sequence[Work], began_ns: int, ended_ns: deque[int], took: Took
    ) -> None:
        """``ended_ns``: when as many batches as gloo has threads have ended, oldest first."""
        self._works, self._began_ns, self._ended_ns, self._took = works, began_ns, ended_ns, took
        self._left = len(works)
        self._lock = threading.Lock()
        try:
            futures = [work.get_future() for work in works]
        except RuntimeError:
            # gloo's point-to-point and broadcast tell nobody of their end but who waits, and a wait
            # that comes late tells too late an end.
            futures = []
        self._tells = bool(futures)
        for future in futures:
            future.add_done_callback(self._ended)

    def finish(self) -> None:
        """Wait for the end. A program that had to wait notices it when it runs again."""
        waits = self._tells and not all(work.is_completed() for work in self._works)
        _wait(self._works)
        if waits:
            with self._lock:
                self._took(perf_counter_ns() - self._began_ns)

    def _ended(self, _: object) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
            now = perf_counter_ns()
            self._began_ns = max(self._began_ns, self._ended_ns[0])
            self._ended_ns.append(now)
            self._took(now - self._began_ns)


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _connect_pair(kind: Any) -> tuple[Any, Any]:
    store = dist.HashStore()
    made: dict[int, Any] = {}

    def connect(rank: int) -> None:
        options = kind._Options()
        options._timeout = timedelta(seconds=60)
        options._devices = [kind.create_device(hostname="127.0.0.1")]
        made[rank] = kind(store, rank, 2, options)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]


def nothing_to_wait_for() -> None:
    """No work to wait for."""
