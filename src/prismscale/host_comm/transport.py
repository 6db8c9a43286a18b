"""gloo itself, for real communication: contexts, and the calls of each normalised record.

gloo's classes are taken from torch before a program's emulated groups take their names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from time import perf_counter_ns  # by name: a program's ``time`` may be logical
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp

COMPUTES_NS = 1_000_000
"""Least computation between issue and wait that counts as computing beside a communication.

With less, the program counts as waiting at once.
"""
_KIND: Any = c10d.ProcessGroupGloo
_TIMEOUT = timedelta(minutes=10)
"""Timeout for members that never come. A member whose process ended is noticed at once."""


def connect(store: Any, rank: int, size: int, *, interface: str | None = None) -> Any:
    """Join a gloo context on a network interface (None: loopback) as one of its members.

    Returns when the other members have come.
    """
    where = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
    options = _KIND._Options()
    options._timeout = _TIMEOUT
    options._devices = [_KIND.create_device(**where)]
    return _KIND(store, rank, size, options)


Call = Callable[[], Work]
"""Starts a communication and does nothing else, as a program's own call of gloo does."""


def prepare(context: Any, collective: Collective) -> list[Call]:
    """Prepare the calls that make ``collective`` in ``context``, with the program's own tensors.

    The root, or the peer, is a rank of the context.
    """
    return _CALLS[collective.op](context, collective)


def start(calls: Sequence[Call]) -> list[Work]:
    """Make the calls below autograd, where a backend runs when a program calls it."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return [call() for call in calls]


class End(Enum):
    """How the end of a communication became known."""

    NOTICED = "by gloo's own thread, as it ended"
    MET = "by a program that waited for it, as it ran again"
    FOUND = "by a program that did not have to wait: it was earlier"


AT_ONCE_NS = 50_000
"""A wait that returns sooner than this counts as no wait."""


class Transfer:
    """gloo works that are started together. It reports when the last of them has ended.

    ``ended(now_ns, how)`` may be called twice: by gloo, from a thread of its own, and by the
    program.
    """

    def __init__(self, ended: Callable[[int, End], None], *, watched: bool = True) -> None:
        """``watched``: let gloo report the end, which runs some Python on gloo's thread."""
        self._tell, self._watched = ended, watched
        self._works: Sequence[Work] = ()
        self._left = 0
        self._began_ns = self._waited_ns = 0
        self._was_over = False
        self._lock = threading.Lock()
        self.notices = False
        """Whether gloo reports the end."""

    def begin(self, works: Sequence[Work]) -> None:
        """Take the works that have been started; there may be none."""
        # Set before callbacks are added: a callback on a future that is done is called at once.
        self._works, self._left = works, len(works)
        try:
            futures = [work.get_future() for work in works] if self._watched else []
        except RuntimeError:
            # gloo's point-to-point and broadcast works report their end only to a waiting thread.
            futures = []
        self.notices = bool(futures)
        for future in futures:
            future.add_done_callback(self._ended)

    def wait(self) -> None:
        """Block until every gloo work object is done.

        Do nothing else first: gloo receives in the waiting thread, so any delay here would be added
        to the transfer.
        """
        self._began_ns = perf_counter_ns()
        # Asked before the waits: after them all works are completed.
        self._was_over = self.notices and all(work.is_completed() for work in self._works)
        for work in self._works:
            work.wait()
        self._waited_ns = perf_counter_ns()

    def is_over(self) -> bool:
        """Whether gloo has completed all works."""
        return all(work.is_completed() for work in self._works)

    def waited(self, since_issue: bool) -> None:
        """Report how the transfer ended; called after :meth:`wait`.

        A program that had to wait there, or has already waited ``since_issue``, noticed the end
        when it ran again.
        """
        if not self._works or (self._was_over and not since_issue):
            return
        # gloo's thread may be reporting at this moment.
        with self._lock:
            had_to = since_issue or self.notices or self._waited_ns - self._began_ns > AT_ONCE_NS
            self._tell(self._waited_ns, End.MET if had_to else End.FOUND)

    def _ended(self, _: object) -> None:
        # Works of a batch end on several of gloo's threads.
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._tell(perf_counter_ns(), End.NOTICED)


def _options(kind: Any, collective: Collective) -> Any:
    options = kind()
    if hasattr(options, "rootRank"):
        options.rootRank = collective.root
    if hasattr(options, "reduceOp") and collective.reduce_op is not None:
        options.reduceOp = collective.reduce_op
    return options


def _all_reduce(context: Any, c: Collective) -> list[Call]:
    options = _options(c10d.AllreduceOptions, c)
    return [partial(context.allreduce, [tensor], options) for tensor in c.outputs]


def _broadcast(context: Any, c: Collective) -> list[Call]:
    options = _options(c10d.BroadcastOptions, c)
    return [partial(context.broadcast, [tensor], options) for tensor in c.outputs]


def _reduce(context: Any, c: Collective) -> list[Call]:
    options = _options(c10d.ReduceOptions, c)
    return [partial(context.reduce, [tensor], options) for tensor in c.outputs]


def _all_gather(context: Any, c: Collective) -> list[Call]:
    if len(c.inputs) == len(c.outputs):
        pairs = zip(c.outputs, c.inputs, strict=True)
        return [partial(context._allgather_base, output, source) for output, source in pairs]
    size = c.group.size
    lists = [list(c.outputs[k * size : (k + 1) * size]) for k in range(len(c.inputs))]
    pairs_of_lists = zip(lists, c.inputs, strict=True)
    return [partial(context.allgather, [outputs], [source]) for outputs, source in pairs_of_lists]


def _reduce_scatter(context: Any, c: Collective) -> list[Call]:
    options = _options(c10d.ReduceScatterOptions, c)
    if len(c.inputs) == len(c.outputs):
        pairs = zip(c.outputs, c.inputs, strict=True)
        return [
            partial(context._reduce_scatter_base, output, source, options)
            for output, source in pairs
        ]
    size = c.group.size
    lists = [list(c.inputs[k * size : (k + 1) * size]) for k in range(len(c.outputs))]
    pairs_of_lists = zip(c.outputs, lists, strict=True)
    return [
        partial(context.reduce_scatter, [out], [sources], options)
        for out, sources in pairs_of_lists
    ]


def _gather(context: Any, c: Collective) -> list[Call]:
    outputs = [list(c.outputs)] if c.outputs else []
    return [partial(context.gather, outputs, list(c.inputs), _options(c10d.GatherOptions, c))]


def _scatter(context: Any, c: Collective) -> list[Call]:
    inputs = [list(c.inputs)] if c.inputs else []
    return [partial(context.scatter, list(c.outputs), inputs, _options(c10d.ScatterOptions, c))]


def _all_to_all(context: Any, c: Collective) -> list[Call]:
    if len(c.inputs) == len(c.outputs) == 1:
        splits = list(c.output_splits), list(c.input_splits)
        return [partial(context.alltoall_base, c.outputs[0], c.inputs[0], *splits)]
    return [partial(context.alltoall, list(c.outputs), list(c.inputs))]


def _send(context: Any, c: Collective) -> list[Call]:
    return [partial(context.send, list(c.inputs), c.root, c.tag)]


def _recv(context: Any, c: Collective) -> list[Call]:
    return [partial(context.recv, list(c.outputs), c.root, c.tag)]


def _barrier(context: Any, c: Collective) -> list[Call]:
    return [context.barrier]


_CALLS: dict[CollectiveOp, Callable[[Any, Collective], list[Call]]] = {
    CollectiveOp.ALL_REDUCE: _all_reduce,
    CollectiveOp.BROADCAST: _broadcast,
    CollectiveOp.REDUCE: _reduce,
    CollectiveOp.ALL_GATHER: _all_gather,
    CollectiveOp.REDUCE_SCATTER: _reduce_scatter,
    CollectiveOp.GATHER: _gather,
    CollectiveOp.SCATTER: _scatter,
    CollectiveOp.ALL_TO_ALL: _all_to_all,
    CollectiveOp.SEND: _send,
    CollectiveOp.RECV: _recv,
    CollectiveOp.BARRIER: _barrier,
}
