"""A process group without peers: each entry point becomes a :class:`Collective` for the hook.

:class:`EmulatedProcessGroup` overrides every communication method of ``ProcessGroup``, under its
torch 2.13 name and under the older one, so that callers in C++ (DDP's Reducer, functional
collectives, ``_broadcast_coalesced``) and in Python end up in :meth:`EmulatedProcessGroup._issue`.
For everything that is not a communication (group name, device types, bound device, backend name)
the C++ base class answers by itself, because each backend the program asks for registers an
*anchor*: torch's ``FakeProcessGroup`` told to raise on any collective. A communication that
bypasses the overrides therefore fails loudly instead of leaving its outputs undefined.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp, Work

from prismscale.capture.facade import EmulatedBackend
from prismscale.capture.hook import Collective, CommunicationHook, GroupHandle
from prismscale.capture.normalise import (
    byte_count,
    is_async,
    merged,
    reduction,
    root_of,
    tensors_of,
)
from prismscale.capture.work import EmulatedWork, completed
from prismscale.errors import PrismscaleError
from prismscale.graph.node import CollectiveOp

_Tensors = tuple[torch.Tensor, ...]


class GroupRegistry(Protocol):
    """Numbers the groups of this rank and knows who answers for them."""

    hook: CommunicationHook

    def adopt(self, group: EmulatedProcessGroup) -> GroupHandle:
        """The handle of a group that torch created by another way than ``new_group``."""
        ...


class _SilentHook:
    """Answers groups of torch's own ``fake`` backend: no communication takes place."""

    def communicate(self, batch: Sequence[Collective]) -> Work:
        return completed([tensor for collective in batch for tensor in collective.outputs])


class _Batch:
    """Communications between ``_start_coalescing`` and ``_end_coalescing``."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.work: Work | None = None

    def add(self, collective: Collective) -> EmulatedWork:
        """Keep it for later; waiting for it before the window closes does nothing."""
        self.collectives.append(collective)
        return EmulatedWork(collective.outputs, self._wait)

    def _wait(self, timeout: timedelta | None) -> None:
        if self.work is not None:
            self.work.wait()


class EmulatedProcessGroup(dist.ProcessGroup):
    """One rank's view of a group whose other members do not exist.

    torch constructs it in place of ``ProcessGroup`` (see :mod:`prismscale.capture.backends`).
    """

    registry: ClassVar[GroupRegistry | None] = None
    """Of the installation in force; torch gives a constructor no way to receive it."""

    def __init__(self, *arguments: Any) -> None:
        """``(store, rank, size)`` or ``(rank, size)``, as ``ProcessGroup`` takes them."""
        *store, rank, size = arguments
        # The base's constructor with a store cannot build a Python subclass.
        super().__init__(rank, size)
        self._store: dist.Store | None = store[0] if store else None
        self._handle: GroupHandle | None = None
        self._hook: CommunicationHook | None = None
        self._batch: _Batch | None = None
        self._backends: dict[str, Any] = {}
        self._sequence_number = 0

    # What torch asks about the group

    @property
    def handle(self) -> GroupHandle:
        """The group as hooks see it."""
        handle = self._handle
        return self._late_handle() if handle is None else handle

    @property
    def is_silent(self) -> bool:
        """True for torch's own ``fake`` backend, which never communicates."""
        return isinstance(self._hook, _SilentHook)

    def enter(self, handle: GroupHandle, hook: CommunicationHook) -> None:
        """Tie the group to the hook that answers it."""
        self._handle = handle
        if self._hook is None:
            self._hook = hook

    def _late_handle(self) -> GroupHandle:
        registry = type(self).registry
        if registry is None:
            raise PrismscaleError(
                "a process group was used after its emulation had ended: keep every communication "
                "inside the `with install(...)` block that created the group"
            )
        self.enter(registry.adopt(self), registry.hook)
        assert self._handle is not None
        return self._handle

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any) -> None:
        self._backends[device.type] = backend
        if isinstance(backend, EmulatedBackend):
            backend.group = weakref.ref(self)
            super()._register_backend(device, backend_type, backend.anchor)
            if not _is_present(device) and "cpu" not in self._backends:
                # The device that this backend serves is not on this machine: cpu stands in.
                self._register_backend(torch.device("cpu"), backend_type, backend)
        else:
            self._hook = _SilentHook()
            super()._register_backend(device, backend_type, backend)

    def _get_backend(self, device: torch.device | str) -> Any:
        backend = self._backends.get(torch.device(device).type)
        if backend is None:
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}"
            )
        return backend

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ asks by this name
        """What C++ is told. DDP's logger casts the backend of a group named ``gloo`` to gloo's."""
        return "emulated"

    def name(self) -> str:
        """The backend's name, as ``ProcessGroup.name()`` spells it."""
        backends = list(self._backends.values())
        return str(backends[0].name()) if backends else "undefined"

    _get_backend_name = name

    def get_group_store(self) -> dist.Store:
        """The store that the group was created with."""
        if self._store is None:
            raise RuntimeError("this process group was created without a store")
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def set_timeout(self, timeout: timedelta) -> None:
        """Accepted; an emulated communication never times out."""

    def shutdown(self) -> None:
        """Nothing runs in the background."""

    def abort(self) -> None:
        """Nothing runs in the background."""

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> EmulatedProcessGroup | None:
        """The group of ``new_ranks`` (ranks of this group); None where this rank is not in it."""
        ranks = sorted(new_ranks)
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self.get_group_store())
        child = type(self)(store, ranks.index(self.rank()), len(ranks))
        kept = [device.type for device in device_types] if device_types else list(self._backends)
        for device in kept:
            backend = self._backends[device].split(child.rank(), child.size(), opts)
            child._register_backend(torch.device(device), backend.backend_type, backend)
            child._set_default_backend(backend.backend_type)
        child._set_group_name(group_name or f"{self.group_name}:split")
        child._set_group_desc(group_desc or f"{self.group_desc}:split")
        return child

    # The single way to the hook

    def _issue(
        self,
        op: CollectiveOp,
        inputs: _Tensors,
        outputs: _Tensors,
        n_bytes: int,
        *,
        root: int = -1,
        reduce_op: ReduceOp | None = None,
        input_splits: tuple[int, ...] = (),
        output_splits: tuple[int, ...] = (),
        tag: int = 0,
        asynchronous: bool = True,
    ) -> Any:
        collective = Collective(
            op=op,
            group=self._handle or self._late_handle(),
            inputs=inputs,
            outputs=outputs,
            n_bytes=n_bytes,
            root=root,
            reduce_op=reduce_op,
            input_splits=input_splits,
            output_splits=output_splits,
            tag=tag,
            asynchronous=asynchronous,
        )
        if self._batch is not None:
            return self._batch.add(collective)
        self._sequence_number += 1
        return self._hook.communicate((collective,))  # type: ignore[union-attr]

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = _Batch()

    def _end_coalescing(self, device: torch.device | None = None) -> Any:
        batch, self._batch = self._batch, None
        if batch is None or not batch.collectives:
            return None
        self._sequence_number += 1
        batch.work = self._hook.communicate(merged(batch.collectives))  # type: ignore[union-attr]
        return batch.work

    # Communications, one method for each entry point of torch

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

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, root: int | None = None) -> Any:
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

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, root: int | None = None
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

    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Any:
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

    def allgather_coalesced(
        self, output_lists: Any, input_list: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """all_gather of several tensors; ``output_lists`` has one list for each *member*."""
        outputs = tuple(tensor for column in zip(*output_lists, strict=True) for tensor in column)
        return self.all_gather_single(outputs, input_list, opts)

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

    def gather(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> Any:
        """Gather to a group rank; ``output`` is empty elsewhere."""
        inputs, outputs = tensors_of(input), tensors_of(output)
        return self._issue(
            CollectiveOp.GATHER,
            inputs,
            outputs,
            byte_count(outputs) or byte_count(inputs) * self.size(),
            root=root_of(opts, root),
            asynchronous=is_async(opts),
        )

    def scatter(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> Any:
        """Scatter from a group rank; ``input`` is empty elsewhere."""
        inputs, outputs = tensors_of(input), tensors_of(output)
        return self._issue(
            CollectiveOp.SCATTER,
            inputs,
            outputs,
            byte_count(inputs) or byte_count(outputs) * self.size(),
            root=root_of(opts, root),
            asynchronous=is_async(opts),
        )

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
        return self._issue(
            CollectiveOp.ALL_TO_ALL,
            (input,),
            (output,),
            max(input.nbytes, output.nbytes),
            input_splits=tuple(input_split_sizes),
            output_splits=tuple(output_split_sizes),
            asynchronous=is_async(opts),
        )

    alltoall_base = all_to_all_single

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

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Send to a group rank."""
        data = tensors_of(tensors)
        return self._issue(CollectiveOp.SEND, data, (), byte_count(data), root=dstRank, tag=tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """Receive from a group rank."""
        data = tensors_of(tensors)
        return self._issue(CollectiveOp.RECV, (), data, byte_count(data), root=srcRank, tag=tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from whoever sends; recorded with root -1.

        Nobody sends here, so ``Work.source_rank()`` answers the member before this one.
        """
        work = self.recv(tensors, -1, tag)
        source = (self.rank() - 1) % self.size()
        if isinstance(work, EmulatedWork):
            work.source = source
            return work
        return EmulatedWork(tensors_of(tensors), lambda _: work.wait(), work.is_completed, source)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait for every member."""
        return self._issue(CollectiveOp.BARRIER, (), (), 0, asynchronous=is_async(opts))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that blocks the host."""
        self._issue(CollectiveOp.BARRIER, (), (), 0, asynchronous=False).wait()


def _is_present(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return device.type == "cpu" or (accelerator is not None and accelerator.type == device.type)
