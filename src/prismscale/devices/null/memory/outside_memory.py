"""Memory of a null GPU outside torch's allocator: CUDA context, NCCL's buffers, symmetric memory.

It lowers the free bytes of ``mem_get_info``, so that torch and NCCL itself run out of memory
earlier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import OutOfMemoryError
from torch.distributed import DistBackendError, Work

from prismscale.cost.nccl.nccl_memory import MIB, Communicator, NcclSettings
from prismscale.emulation.backends.backend_order import is_in_host_memory
from prismscale.emulation.hook import Collective, CommunicationHook
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import MemoryPart

_Route = tuple[int, CollectiveOp, int]
"""Group index, operation and peer. They determine the connections that a communication uses."""


def _route(collective: Collective) -> _Route:
    return collective.group.group_index, collective.op, collective.root


class OutsideMemory:
    """Account of the memory outside torch's allocator; it grows as the program communicates."""

    def __init__(
        self, library: ctypes.PyDLL, *, context_bytes: int, settings: NcclSettings
    ) -> None:
        self._library = library
        self._context_bytes = context_bytes
        self._settings = settings
        self._communicators: dict[int, Communicator] = {}
        self._names: dict[int, str] = {}
        self._connected: set[_Route] = set()
        self._held_bytes = context_bytes
        self._symmetric_bytes = 0

    def seen_by(self, hook: CommunicationHook) -> CommunicationHook:
        """Return a hook that connects each batch here before it passes the batch on to ``hook``."""
        return _ConnectingHook(self, hook)

    def parts(self) -> tuple[MemoryPart, ...]:
        """Return the parts of this memory, largest first; groups of the same name count as one."""
        held = {"CUDA context": self._context_bytes, "symmetric memory": self._symmetric_bytes}
        for group_index, communicator in self._communicators.items():
            name = f"NCCL {self._names[group_index]}"
            held[name] = held.get(name, 0) + communicator.n_bytes
        parts = (MemoryPart(name=name, n_bytes=n) for name, n in held.items() if n)
        return tuple(sorted(parts, key=lambda part: -part.n_bytes))

    def hold_symmetric(self, n_bytes: int) -> None:
        """Grow the symmetric memory by ``n_bytes``; a negative number shrinks it.

        Raises:
            OutOfMemoryError: the GPU has no room for it.
        """
        device = self._library.ps_current_device()
        free = int(self._library.ps_free_bytes(device))
        if n_bytes > free:
            self._library.ps_note_out_of_memory(device)
            raise OutOfMemoryError(
                f"CUDA driver error: out of memory: GPU {device} has {free / MIB:.0f} MiB free, "
                f"and {n_bytes / MIB:.0f} MiB of symmetric memory are asked for"
            )
        self._symmetric_bytes += n_bytes
        self._held_bytes += n_bytes
        self._library.ps_set_outside_bytes(device, self._held_bytes)

    def connect(self, batch: Sequence[Collective]) -> None:
        """Set up the NCCL connections that a batch of communications needs.

        Raises:
            DistBackendError: the GPU has no room for NCCL's buffers.
        """
        # Most communications repeat an earlier one, and then there is nothing to do.
        new = {key: c for c in batch if (key := _route(c)) not in self._connected}
        # Communications by a library's own kernels need none of NCCL's buffers.
        new = {key: c for key, c in new.items() if not c.is_of_library}
        if not new or is_in_host_memory(batch):
            return
        for route, collective in new.items():
            self._connected.add(route)
            self._connect(collective)
        self._grow_to(sum(part.n_bytes for part in self.parts()), next(iter(new.values())))

    def _connect(self, collective: Collective) -> None:
        group, op = collective.group, collective.op
        if op == CollectiveOp.SYMM_MEM_BARRIER:
            return
        if group.group_index not in self._communicators:
            own = group.ranks[group.group_rank]
            self._communicators[group.group_index] = Communicator(
                settings=self._settings, ranks=group.ranks, rank=own
            )
            self._names[group.group_index] = group.name or f"group of {group.size}"
        communicator = self._communicators[group.group_index]
        others = [rank for rank in group.ranks if rank != group.ranks[group.group_rank]]
        if op == CollectiveOp.ALL_TO_ALL:
            communicator.connect_messages(sends_to=others, receives_from=others)
        elif op == CollectiveOp.SEND:
            communicator.connect_messages(sends_to=[group.ranks[collective.root]], receives_from=[])
        elif op == CollectiveOp.RECV:
            communicator.connect_messages(sends_to=[], receives_from=[group.ranks[collective.root]])
        elif op in (CollectiveOp.GATHER, CollectiveOp.SCATTER):
            self._connect_root(communicator, collective, others)
        else:
            communicator.connect_rings(reduces=op == CollectiveOp.ALL_REDUCE)

    @staticmethod
    def _connect_root(
        communicator: Communicator, collective: Collective, others: Sequence[int]
    ) -> None:
        """Connect the root with the others: torch builds gather and scatter from send and recv."""
        group = collective.group
        is_root = collective.root == group.group_rank
        peers = others if is_root else [group.ranks[collective.root]]
        sends = is_root == (collective.op == CollectiveOp.SCATTER)
        communicator.connect_messages(
            sends_to=peers if sends else [], receives_from=[] if sends else peers
        )

    def _grow_to(self, n_bytes: int, collective: Collective) -> None:
        device = self._library.ps_current_device()
        grows_by, free = n_bytes - self._held_bytes, int(self._library.ps_free_bytes(device))
        if grows_by > free:
            self._library.ps_note_out_of_memory(device)
            raise DistBackendError(
                f"NCCL error: unhandled cuda error, out of memory: GPU {device} has "
                f"{free / MIB:.0f} MiB free, and NCCL's buffers for {collective.op.spelling} in "
                f"{self._names[collective.group.group_index]!r} take {grows_by / MIB:.0f} MiB. "
                f"{self._held_bytes / MIB:.0f} MiB are held outside torch's allocator already"
            )
        self._held_bytes = n_bytes
        self._library.ps_set_outside_bytes(device, n_bytes)


class _ConnectingHook:
    """Hook that passes every batch to :class:`OutsideMemory` before it is answered."""

    def __init__(self, outside: OutsideMemory, hook: CommunicationHook) -> None:
        self._outside, self._hook = outside, hook

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """See :class:`~prismscale.emulation.hook.CommunicationHook`."""
        self._outside.connect(batch)
        return self._hook.communicate(batch)
