"""The entry points of a process group, and the single path from them to the hook.

Each communication method of ``ProcessGroup`` is here once, under its torch 2.13 name and its older
names, so that callers in C++ (DDP's Reducer, functional collectives, ``_broadcast_coalesced``)
and in Python all end up in :meth:`EntryPoints._issue`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from time import perf_counter_ns  # bound by name: ``time`` may answer logical time
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed import ReduceOp, Work

from prismscale.emulation.arguments import (
    byte_count,
    is_async,
    merged,
    reduction,
    root_of,
    splits_of,
    tensors_of,
)
from prismscale.emulation.hook import Captures, Collective, CommunicationHook, GroupHandle
from prismscale.emulation.work import EmulatedWork, completed
from prismscale.graph.node import CollectiveOp

_Tensors = tuple[torch.Tensor, ...]


class _Batch:
    """Communications between ``_start_coalescing`` and ``_end_coalescing``."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.work: Work | None = None

    def add(self, collective: Collective) -> EmulatedWork:
        """Add a communication. Waiting for it before the batch is issued does nothing."""
        self.collectives.append(collective)
        return EmulatedWork(collective.outputs, self._wait)

    def _wait(self, timeout: timedelta | None) -> None:
        if self.work is not None:
            self.work.wait()


def _is_of_a_tracer(group: object) -> bool:
    """Return True if torch.compile runs this communication on a constant while it traces.

    A tensor made of numbers (``torch.tensor([n])``) has a value at trace time, so a tracer executes
    the calls on it in addition to recording them. How often it does depends on which of its caches
    are warm, so one rank of a job would appear to communicate more often than another. The compiled
    region issues the communication itself. Dynamo's own messages between ranks use a group of their
    own, for which the answer is False.
    """
    if TracingContext.try_get() is None:
        return False
    dynamo = sys.modules.get("torch._dynamo.distributed")
    return group is not getattr(dynamo, "_COMPILE_PG", None)


def _entry(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note the time of the program's call first: all time in ``method`` is the emulation's."""

    @wraps(method)
    def enter(self: EntryPoints, *arguments: Any, **options: Any) -> Any:
        self._called_ns = perf_counter_ns()
        return method(self, *arguments, **options)

    return enter


class EntryPoints:
    """The communication methods of a group, answered by :attr:`_hook`."""

    _handle: GroupHandle | None = None
    _hook: CommunicationHook | None = None
    _batch: _Batch | None = None
    _sequence_number: int = 0
    _called_ns: int = 0
    """Time of the program's last call into this group, on the monotonic clock."""

    @property
    def handle(self) -> GroupHandle:
        """The group as hooks see it; a subclass registers a group that has no handle yet."""
        assert self._handle is not None
        return self._handle

    def _issue(
        self,
        op: CollectiveOp,
        inputs: _Tensors,
        outputs: _Tensors,
        n_bytes: int,
        *,
        root: int = -1,
        reduce_op: ReduceOp | None = None,
        input_splits: Sequence[int] = (),
        output_splits: Sequence[int] = (),
        tag: int = 0,
        asynchronous: bool = True,
    ) -> Any:
        if _is_of_a_tracer(self):
            return completed(outputs)
        collective = Collective(
            op=op,
            group=self._handle or self.handle,
            inputs=inputs,
            outputs=outputs,
            n_bytes=n_bytes,
            root=root,
            reduce_op=reduce_op,
            input_splits=input_splits,
            output_splits=output_splits,
            tag=tag,
            asynchronous=asynchronous,
            # A call inside a batch is answered later, when the batch ends.
            called_ns=self._called_ns if self._batch is None else 0,
        )
        if self._batch is not None:
            return self._batch.add(collective)
        self._sequence_number += 1
        return self._communicate((collective,))

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = _Batch()

    @_entry
    def _end_coalescing(self, device: torch.device | None = None) -> Any:
        batch, self._batch = self._batch, None
        if batch is None or not batch.collectives:
            return None
        self._sequence_number += 1
        collectives = merged(batch.collectives)
        collectives[0].called_ns = self._called_ns
        batch.work = self._communicate(collectives)
        return batch.work

    def _communicate(self, batch: Sequence[Collective]) -> Work:
        if Captures.under_way is not None:
            return Captures.under_way.communicate(batch, self._answer)
        return self._answer(batch)

    def _answer(self, batch: Sequence[Collective]) -> Work:
        return self._hook.communicate(batch)  # type: ignore[union-attr]

    @_entry
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> Any:
        """all_reduce of one tensor, or of several as one record."""
        data = tensors_of(tensors)
        return self._issue(
            CollectiveOp.ALL_REDUCE,
            data,
            data,
            byte_count(data),
            reduce_op=reduction(opts, op),
            asynchronous=is_async(opts),
        )

    allreduce_coalesced = allreduce

    @_entry
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> Any:
        """Broadcast from a group rank."""
        data = tensors_of(tensors)
        return self._issue(
            CollectiveOp.BROADCAST,
            data,
            data,
            byte_count(data),
            root=root_of(opts, root),
            asynchronous=is_async(opts),
        )

    @_entry
    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        root: int | None = None,
    ) -> Any:
        """Reduce to a group rank."""
        data = tensors_of(tensors)
        return self._issue(
            CollectiveOp.REDUCE,
            data,
            data,
            byte_count(data),
            root=root_of(opts, root),
            reduce_op=reduction(None if isinstance(opts, int) else opts, op),
            asynchronous=is_async(opts),
        )

    @_entry
    def all_gather_single(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """all_gather into one flat tensor, or several of them as one record."""
        outputs = tensors_of(output)
        return self._issue(
            CollectiveOp.ALL_GATHER,
            tensors_of(input),
            outputs,
            byte_count(outputs),
            asynchronous=is_async(opts),
        )

    all_gather_single_coalesced = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single
    _allgather_base = all_gather_single
    allgather = all_gather_single

    @_entry
    def allgather_coalesced(
        self, output_lists: Any, input_list: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """all_gather of several tensors; ``output_lists`` has one list for each *member*."""
        outputs = tuple(tensor for column in zip(*output_lists, strict=True) for tensor in column)
        return self.all_gather_single(outputs, input_list, opts)

    @_entry
    def reduce_scatter_single(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None, op: Any = None
    ) -> Any:
        """reduce_scatter of one flat tensor, or of several as one record."""
        inputs = tensors_of(input)
        return self._issue(
            CollectiveOp.REDUCE_SCATTER,
            inputs,
            tensors_of(output),
            byte_count(inputs),
            reduce_op=reduction(opts, op),
            asynchronous=is_async(opts),
        )

    reduce_scatter_single_coalesced = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter = reduce_scatter_single

    @_entry
    def gather(
        self,
        output: Any,
        input: Any,
        opts: Any = None,
        timeout: Any = None,
        root: int | None = None,
    ) -> Any:
        """Gather to a group rank; ``output`` is empty elsewhere."""
        inputs, outputs = tensors_of(input), tensors_of(output)
        return self._issue(
            CollectiveOp.GATHER,
            inputs,
            outputs,
            byte_count(outputs) or byte_count(inputs) * self.handle.size,
            root=root_of(opts, root),
            asynchronous=is_async(opts),
        )

    @_entry
    def scatter(
        self,
        output: Any,
        input: Any,
        opts: Any = None,
        timeout: Any = None,
        root: int | None = None,
    ) -> Any:
        """Scatter from a group rank; ``input`` is empty elsewhere."""
        inputs, outputs = tensors_of(input), tensors_of(output)
        return self._issue(
            CollectiveOp.SCATTER,
            inputs,
            outputs,
            byte_count(inputs) or byte_count(outputs) * self.handle.size,
            root=root_of(opts, root),
            asynchronous=is_async(opts),
        )

    @_entry
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """all_to_all of flat tensors; empty splits mean an even split."""
        asynchronous = is_async(opts)
        return self._issue(
            CollectiveOp.ALL_TO_ALL,
            (input,),
            (output,),
            max(input.nbytes, output.nbytes),
            input_splits=splits_of(input_split_sizes, keep=asynchronous),
            output_splits=splits_of(output_split_sizes, keep=asynchronous),
            asynchronous=asynchronous,
        )

    alltoall_base = all_to_all_single

    @_entry
    def exchange(self, like: torch.Tensor, n_bytes: int, *, asynchronous: bool) -> Any:
        """all_to_all of ``n_bytes`` by a library's own kernels on the device of ``like``.

        The library itself defines the values of its outputs.
        """
        nothing = (like[:0],)
        return self._issue(
            CollectiveOp.ALL_TO_ALL, nothing, nothing, n_bytes, asynchronous=asynchronous
        )

    @_entry
    def alltoall(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Any:
        """all_to_all of one tensor for each member."""
        inputs, outputs = tensors_of(input), tensors_of(output)
        return self._issue(
            CollectiveOp.ALL_TO_ALL,
            inputs,
            outputs,
            max(byte_count(inputs), byte_count(outputs)),
            asynchronous=is_async(opts),
        )

    @_entry
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Send to a group rank."""
        data = tensors_of(tensors)
        return self._issue(CollectiveOp.SEND, data, (), byte_count(data), root=dstRank, tag=tag)

    @_entry
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """Receive from a group rank."""
        data = tensors_of(tensors)
        return self._issue(CollectiveOp.RECV, (), data, byte_count(data), root=srcRank, tag=tag)

    @_entry
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from any member.

        No peer really sends, so the source is taken to be the member before this one, both in the
        record and in ``Work.source_rank()``.
        """
        source = (self.handle.group_rank - 1) % self.handle.size
        work = self.recv(tensors, source, tag)
        if isinstance(work, EmulatedWork):
            work.source = source
            return work
        return EmulatedWork(tensors_of(tensors), lambda _: work.wait(), work.is_completed, source)

    @_entry
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait for every member."""
        return self._issue(CollectiveOp.BARRIER, (), (), 0, asynchronous=is_async(opts))

    @_entry
    def symm_mem_barrier(self, channel: int) -> None:
        """Barrier of a symmetric memory's handle: orders all members' streams, blocks no host."""
        op = CollectiveOp.SYMM_MEM_BARRIER
        self._issue(op, (), (), 0, tag=channel, asynchronous=False).wait()

    @_entry
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that blocks the host."""
        self._issue(CollectiveOp.BARRIER, (), (), 0, asynchronous=False).wait()
