"""The work of communication that slows down computation on the same processor.

On a GPU target the network's work does not load the host. On a CPU target gloo's threads copy, send
and reduce on the very cores that compute (a 2-rank DDP step of 92 ms computation costs 102 ms with
4 ms of all-reduce), so a rank that runs alone must do its share of that work too.

[Note: a rank's share] In a ring over ``K`` members a rank sends and receives ``2 (K - 1) / K`` of
an all-reduced tensor and adds up half of that. Two gloo contexts inside this process that
all-reduce ``M`` bytes together send ``2 M`` and add up ``M``: with ``M = (K - 1) / K * bytes`` the
pair does, over the same sockets and in gloo's own threads, exactly the work of one rank. The other
collectives follow in the same way.

The time that the pair took beside this program's computation is noted too. gloo's threads wait for
a core that computes (a 128 KiB all-reduce of 0.4 ms takes 1 to 2 ms under a backward pass), and no
calibration of communication alone shows that. If the program waits for the pair, the pair counts as
done when the program runs again: on a busy core that takes another wake-up.

[Note: the pair's buffers] gloo gathers into buffers from the program's own allocator, but the
pair's buffers are not the rank's (see :mod:`prismscale.emulation.backends.backend_memory`). So the
pair works only once the program's memory is no longer tracked. Steps before that are not timed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns  # by name: a program's ``time`` may be logical
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import Work

from prismscale.emulation.backends.backend_order import GLOO_THREADS
from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.transport import End, Transfer, connect

SMALLEST_BYTES = 1024
"""Below this, handling the pair would cost more than the work it stands for."""
LARGEST_BYTES = 256 << 20
"""Size of the scratch memory. Larger communications do only this much work."""


class DurationCallback(Protocol):
    """Called, perhaps on a thread of the backend, with how long a batch's communications took."""

    def __call__(self, ns: int, index: int | None = None, late_ns: int = 0, /) -> None:
        """
        Args:
            ns: duration of communication ``index`` of the batch, or of each where it is None.
            late_ns: how much later than the end the waiting program resumed.
        """
        ...


class LocalWork(Protocol):
    """A rank's part in one batch of communications."""

    def begin(self) -> None:
        """Start the work in the background, and do no more than a backend's own call does."""
        ...

    def wait(self) -> None:
        """Wait for the end. Do nothing before the wait."""
        ...

    def is_over(self) -> bool:
        """Whether :meth:`wait` would return at once; asked of work that fills the outputs."""
        ...

    def waited(self, since_issue: bool) -> None:
        """Note the end, after :meth:`wait`. ``since_issue``: the program had waited before that."""
        ...


class CommunicationLoad(Protocol):
    """Performs this rank's share of a communication's work on the local processor."""

    @property
    def interrupts(self) -> bool:
        """Whether the work takes the core of the program's thread."""
        ...

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """Return the work of a batch, which has not begun."""
        ...

    def answers(self, collective: Collective) -> bool:
        """Whether the work also fills the outputs, because other ranks take part in it."""
        ...


class NoWork:
    """The work of a batch that has none."""

    def begin(self) -> None:
        """Nothing to do."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_over(self) -> bool:
        """Always true."""
        return True

    def waited(self, since_issue: bool) -> None:
        """Nothing to note."""


class NullLoad:
    """Communication costs the local processor nothing."""

    interrupts = False

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """Return no work."""
        return NoWork()

    def answers(self, collective: Collective) -> bool:
        """Always false: no other rank takes part."""
        return False


class DeferredLoad:
    """A load that costs nothing before :meth:`start`: see [Note: the pair's buffers]."""

    def __init__(self, load: CommunicationLoad) -> None:
        self._load = load
        self._now: CommunicationLoad = NullLoad()

    def start(self) -> None:
        """Let later communications cost what the load says; safe to call again."""
        self._now = self._load

    @property
    def interrupts(self) -> bool:
        """Same as the load itself, once started."""
        return self._now.interrupts

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """Same as the load itself, once started."""
        return self._now.share(batch, took)

    def answers(self, collective: Collective) -> bool:
        """Same as the load itself, once started."""
        return self._now.answers(collective)


class GlooLoad:
    """A pair of gloo contexts in this process that do one rank's share of the work."""

    interrupts = True

    def __init__(self) -> None:
        self._pair = _connect_pair()
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self.ended_ns: deque[int] = deque([0] * GLOO_THREADS, maxlen=GLOO_THREADS)
        """Ends of the latest batches, as many as gloo has threads, oldest first."""

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """Return the pair's communication."""
        return PairWork(self, batch, took)

    def answers(self, collective: Collective) -> bool:
        """Always false: both ends are this rank's, and no other rank takes part."""
        return False

    def start(self, collective: Collective) -> list[Work]:
        """Let the two contexts do this rank's share."""
        size, op = collective.group.size, collective.op
        tensors = collective.inputs or collective.outputs
        if size < 2 or not tensors:
            return []
        # See [Note: a rank's share].
        share = (size - 1) / size
        if op.is_p2p:
            self._message(collective)
            return []
        if op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.GATHER):
            # A rank is one end of a transfer, but the pair does the work of both ends.
            share = 0.5
        n_bytes = min(int(collective.n_bytes * share), LARGEST_BYTES)
        if n_bytes < SMALLEST_BYTES:
            return []
        # An even number: an all-gather takes each half from one end.
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
        # The receiver first: data that comes before it is asked for costs the receiver twice.
        received = second.recv([b], 0, 0)
        return [first.send([a], 1, 0), received]

    def _message(self, collective: Collective) -> None:
        """Do the work of a send as a copy; a receive does nothing here.

        gloo writes a message to the socket in the sender's own thread, and reads one while the
        receiver waits. A pair would do both here, at ten times the cost: its reader, on the
        sender's core, would be woken for every segment.
        """
        if collective.op == CollectiveOp.SEND:
            sent = collective.inputs[0]
            n = min(sent.numel(), LARGEST_BYTES // sent.element_size())
            a, b = self._tensors(sent.dtype, n)
            b[:n].copy_(a[:n])

    def _tensors(self, dtype: torch.dtype, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two zeroed buffers: sums of zeros stay zero, so no value ever overflows.

        NumPy allocates them, so that tracking of torch's allocator does not see them.
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


class PairWork:
    """The pair's work on one batch. It reports the time since gloo had a thread free for it."""

    def __init__(
        self, pair: GlooLoad, batch: Sequence[Collective], took: DurationCallback | None
    ) -> None:
        self._pair, self._batch, self._took = pair, batch, took
        self._began_ns = 0
        self._transfer = Transfer(self._ended, watched=took is not None)
        # These are the transfer's own methods: a call in between would delay gloo's wait.
        self.wait, self.waited = self._transfer.wait, self._transfer.waited
        self.is_over = self._transfer.is_over

    def begin(self) -> None:
        """Start the pair's communication."""
        self._began_ns = perf_counter_ns()
        self._transfer.begin([w for c in self._batch for w in self._pair.start(c)])

    def _ended(self, now_ns: int, how: End) -> None:
        if self._took is None:
            return
        if how is End.NOTICED:
            # gloo works on one batch per thread, so this one waited until an earlier one had ended.
            self._began_ns = max(self._began_ns, self._pair.ended_ns[0])
            self._pair.ended_ns.append(now_ns)
        elif not self._transfer.notices:
            # A program that comes late to its wait would report too late an end.
            return
        self._took(now_ns - self._began_ns)


def _connect_pair() -> tuple[Any, Any]:
    store = dist.HashStore()
    made: dict[int, Any] = {}

    def join(rank: int) -> None:
        made[rank] = connect(store, rank, 2)

    # Both at once, because each end waits until the other has come.
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]
