"""Symmetric memory on the null device: each rank of a group has a tensor that all ranks can access.

torch's own Python code (``torch.distributed._symmetric_memory``, async tensor parallelism) runs on
the class here, which replaces torch's class that asks the CUDA driver. The other ranks of a group
do not exist. Their memory has addresses, and kernels that read or write it are costed as NVLink
traffic. Barriers are communications of the group.

If a matrix product is pipelined with its communication, its chunks are issued on two streams, and
each chunk fills the GPU. Here they take turns, in the order in which they are issued.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.distributed import distributed_c10d

from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.libraries.launches import launch, memory

_OWN, _PEERS = 1 << 44, 1 << 43
"""First address of this GPU's symmetric memory, and of other GPUs': see ``csrc/signature.cpp``."""
_GRANULARITY = 2 << 20
"""CUDA maps memory that other GPUs can access in pieces of this size."""
_SIGNAL_PAD_BYTES = 2048
_CHUNKED = {
    "_pipelined_multi_all_gather_and_consume": 1,
    "_pipelined_all_gather_and_consume_last_dim": 1,
    "_pipelined_produce_and_all2all": 0,
}
"""torch's functions that issue the chunks of a product on two streams. The value is the index of
the argument that computes a chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """One symmetric allocation: this rank's and the equal ones of the other ranks."""

    n_bytes: int
    """Size without the signal pad, the words by which ranks signal each other."""
    offset: int
    """Offset of its address from the first address of a GPU's symmetric memory."""
    group_name: str | None


class Handle:
    """Result of ``rendezvous``: an allocation, with those of all ranks of a group.

    It does not keep any of them alive.
    """

    def __init__(self, device: torch.device, piece: _Piece, group: Any) -> None:
        self.device = device
        self._piece = piece
        self._group = group
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.rank, self.world_size = group.rank(), group.size()
        self.offset = 0
        self.multicast_ptr = 0
        self.buffer_size = piece.n_bytes
        self.signal_pad_size = _SIGNAL_PAD_BYTES
        self.buffer_ptrs = [self._address(rank) for rank in range(self.world_size)]
        self.signal_pad_ptrs = [address + piece.n_bytes for address in self.buffer_ptrs]
        self._pad = self.get_buffer(self.rank, (0,), torch.uint8)

    def get_buffer(
        self,
        rank: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        storage_offset: int | None = 0,
    ) -> torch.Tensor:
        """Return a tensor in the memory of ``rank`` that starts at element ``storage_offset``.

        Raises:
            RuntimeError: the tensor would exceed the allocation.
        """
        offset = storage_offset or 0
        stop = (offset + math.prod(sizes)) * dtype.itemsize
        if stop > self.buffer_size:
            raise RuntimeError(
                f"symmetric memory of {self.buffer_size} bytes has no room for {stop} bytes"
            )
        stride = torch._prims_common.make_contiguous_strides_for(tuple(sizes))
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self._storage_of(rank), offset, sizes, stride)

    get_remote_tensor = get_buffer

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int | None = 0,
    ) -> torch.Tensor:
        """Return the words by which the program's own kernels signal each other.

        They have no values.
        """
        dtype = dtype or torch.uint32
        sizes = sizes or (_SIGNAL_PAD_BYTES // dtype.itemsize,)
        return self.get_buffer(rank, sizes, dtype, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait until the streams of all ranks have reached the barrier."""
        launch("symm_mem::barrier", memory("fill", n_bytes=0), writes=[self._pad])
        self._group.symm_mem_barrier(channel)

    def _storage_of(self, rank: int) -> torch.UntypedStorage:
        if rank not in self._storages:
            self._storages[rank] = _storage(self._address(rank), self.device, self.buffer_size)
        return self._storages[rank]

    def _address(self, rank: int) -> int:
        return (_OWN if rank == self.rank else _PEERS) + self._piece.offset


class SymmetricMemory:
    """Replacement of ``torch._C._distributed_c10d._SymmetricMemory``, whose methods are static."""

    signal_pad_size = _SIGNAL_PAD_BYTES

    def __init__(self, devices_per_domain: int, hold: Callable[[int], None]) -> None:
        """
        Args:
            devices_per_domain: number of GPUs, in a node or NVLink domain, that can map each
                other's memory.
            hold: called with the bytes that are allocated (negative: freed) outside torch's
                allocator; raises if the GPU has no room.
        """
        self._devices_per_domain = devices_per_domain
        self._hold = hold
        self._pieces: dict[int, _Piece] = {}
        """This rank's allocations by address."""
        self._handles: dict[tuple[int, str], Handle] = {}
        self._next_offset = 0

    def empty_strided_p2p(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """Allocate a tensor that the other ranks of a group can access after a rendezvous."""
        span = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        n_bytes = (span + 1) * dtype.itemsize if math.prod(size) else 0
        mapped = -(-(n_bytes + self.signal_pad_size) // _GRANULARITY) * _GRANULARITY
        self._hold(mapped)
        piece = _Piece(n_bytes=n_bytes, offset=self._next_offset, group_name=group_name)
        self._next_offset += mapped
        address = _OWN + piece.offset
        storage = _storage(address, device, n_bytes)
        self._pieces[address] = piece
        weakref.finalize(storage, self._give_back, address, mapped)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, stride)

    def rendezvous(self, tensor: torch.Tensor, group_name: str | None = None) -> Handle | None:
        """Return the memory of all ranks of a group; None if ``tensor`` is not symmetric.

        Raises:
            RuntimeError: no group is named, or its ranks are in several nodes or NVLink
                domains: a GPU maps memory within its own only.
        """
        address = tensor.untyped_storage().data_ptr()
        piece = self._pieces.get(address)
        if piece is None:
            return None
        name = group_name or piece.group_name
        if name is None:
            raise RuntimeError("rendezvous needs a group: none was named when memory was allocated")
        handle = self._handles.get((address, name))
        if handle is None:
            group: Any = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(name))
            self._check_domains(group.handle.ranks)
            handle = self._handles[address, name] = Handle(tensor.device, piece, group)
        return handle

    def is_symm_mem_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether :meth:`empty_strided_p2p` allocated the tensor."""
        return tensor.is_cuda and tensor.untyped_storage().data_ptr() in self._pieces

    def has_multicast_support(self, device_type: Any, device_index: int) -> bool:
        """Return False: code that could multicast through the switch takes its ordinary path."""
        return False

    def set_group_info(self, group_name: str, rank: int, world_size: int, store: Any) -> None:
        """Do nothing: a group is looked up at its rendezvous."""

    def set_backend(self, name: str) -> None:
        """Do nothing: all backends map the same memory."""

    def get_backend(self, device: torch.device) -> str | None:
        """Return the backend that torch has if the CUDA driver maps the memory."""
        return "CUDA" if device.type == "cuda" else None

    def get_mempool_allocator(self, device: torch.device) -> None:
        """Return None: pools of the null device use the allocator model."""

    def stream_write_value32(self, tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """Return ``tensor``: the stream itself writes the value, without a kernel."""
        return tensor

    def memset32(self, tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        """Fill ``count`` 32-bit words from ``offset`` on, by a kernel."""
        tensor.view(torch.int32)[offset : offset + count].fill_(val)
        return tensor

    def _give_back(self, address: int, mapped: int) -> None:
        del self._pieces[address]
        self._handles = {key: h for key, h in self._handles.items() if key[0] != address}
        self._hold(-mapped)

    def _check_domains(self, ranks: Sequence[int]) -> None:
        domains = {rank // self._devices_per_domain for rank in ranks}
        if len(domains) > 1:
            raise RuntimeError(
                f"symmetric memory of a group on {len(domains)} nodes or NVLink domains of "
                f"{self._devices_per_domain} GPUs: GPUs map each other's memory within one only. "
                "Keep the group within one"
            )


def install(devices_per_domain: int, hold: Callable[[int], None]) -> None:
    """Replace torch's class from now on; arguments as for :class:`SymmetricMemory`."""
    c10d: Any = torch._C._distributed_c10d
    c10d._SymmetricMemory = emulated = SymmetricMemory(devices_per_domain, hold)

    def replace(module: Any) -> None:
        module._SymmetricMemory = emulated
        for name, argument in _CHUNKED.items():
            if hasattr(module, name):  # not in every version of torch
                setattr(module, name, _in_turns(getattr(module, name), argument))

    Watcher({"torch.distributed._symmetric_memory": replace}).begin()


def _in_turns(pipelined: Callable[..., None], argument: int) -> Callable[..., None]:
    """Wrap ``pipelined`` so that chunks of the product run one after another, on any stream."""

    @wraps(pipelined)
    def run(*arguments: Any, **named: Any) -> None:
        compute, last = arguments[argument], torch.cuda.Event()
        last.record()

        def compute_alone(*chunk: Any) -> None:
            torch.cuda.current_stream().wait_event(last)
            compute(*chunk)
            last.record()

        before, after = arguments[:argument], arguments[argument + 1 :]
        pipelined(*before, compute_alone, *after, **named)

    return run


def _storage(address: int, device: torch.device, n_bytes: int) -> torch.UntypedStorage:
    """Return a storage at an address that no allocator handed out."""
    make: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = make(address, device, n_bytes)
    return storage
