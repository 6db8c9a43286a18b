"""Symmetric memory on the null device: tensors of which every member of a group has one, and which
all of them read and write.

torch's own Python code (``torch.distributed._symmetric_memory``, async tensor parallelism) runs on
the class here, which stands where torch has one that asks CUDA's driver. A group's other members do
not exist: their memory has addresses, and what reads or writes it is costed as going over NVLink.
Barriers are communications of the group.

The chunks of a product that is pipelined with its communication are issued on two streams, and each
fills the GPU: here they take turns, in the order in which they are issued.
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
"""First addresses of this GPU's symmetric memory, and of that of others: ``csrc/signature.cpp``."""
_GRANULARITY = 2 << 20
"""CUDA maps memory that others see in pieces of this size."""
_SIGNAL_PAD_BYTES = 2048
_CHUNKED = {
    "_pipelined_multi_all_gather_and_consume": 1,
    "_pipelined_all_gather_and_consume_last_dim": 1,
    "_pipelined_produce_and_all2all": 0,
}
"""torch's functions that issue chunks of a product on two streams, and which argument computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """One allocation, and those of the other members."""

    n_bytes: int
    """Without the words by which members signal each other."""
    offset: int
    """Of its address within the addresses of a GPU."""
    group_name: str | None


class Handle:
    """What ``rendezvous`` returns: an allocation with those of all members of a group. It keeps
    none of them from being given back."""

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
        """The memory of the member ``rank``, from ``storage_offset`` elements on."""
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
        """Words by which kernels of the program's own signal each other; nothing is in them."""
        dtype = dtype or torch.uint32
        sizes = sizes or (_SIGNAL_PAD_BYTES // dtype.itemsize,)
        return self.get_buffer(rank, sizes, dtype, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """The current stream goes on when all members' streams have come here."""
        launch("symm_mem::barrier", memory("fill", n_bytes=0), writes=[self._pad])
        self._group.symm_mem_barrier(channel)

    def _storage_of(self, rank: int) -> torch.UntypedStorage:
        if rank not in self._storages:
            self._storages[rank] = _storage(self._address(rank), self.device, self.buffer_size)
        return self._storages[rank]

    def _address(self, rank: int) -> int:
        return (_OWN if rank == self.rank else _PEERS) + self._piece.offset


class SymmetricMemory:
    """Stands for ``torch._C._distributed_c10d._SymmetricMemory``, whose functions are static."""

    signal_pad_size = _SIGNAL_PAD_BYTES

    def __init__(self, devices_per_node: int, hold: Callable[[int], None]) -> None:
        """
        Args:
            devices_per_node: whose memory can be mapped.
            hold: told how many bytes are taken (or, negative, given back) outside torch's
                allocator; raises where the GPU has no room.
        """
        self._devices_per_node = devices_per_node
        self._hold = hold
        self._pieces: dict[int, _Piece] = {}
        """By address."""
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
        """A tensor that other members of a group can see, once it was shown to them."""
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
        """The memory of all members; None for a tensor that is not symmetric.

        Raises:
            RuntimeError: members are on several nodes, whose memory no GPU can map.
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
            self._check_nodes(group.handle.ranks)
            handle = self._handles[address, name] = Handle(tensor.device, piece, group)
        return handle

    def is_symm_mem_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`empty_strided_p2p` made it."""
        return tensor.is_cuda and tensor.untyped_storage().data_ptr() in self._pieces

    def has_multicast_support(self, device_type: Any, device_index: int) -> bool:
        """No: what would use the switch's own copies and sums takes the ordinary way."""
        return False

    def set_group_info(self, group_name: str, rank: int, world_size: int, store: Any) -> None:
        """Groups are looked up when they meet."""

    def set_backend(self, name: str) -> None:
        """All of them map the same memory."""

    def get_backend(self, device: torch.device) -> str | None:
        """As where CUDA's driver maps it."""
        return "CUDA" if device.type == "cuda" else None

    def get_mempool_allocator(self, device: torch.device) -> None:
        """The null device's pools take the model's allocator."""

    def stream_write_value32(self, tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """By the stream, without a kernel."""
        return tensor

    def memset32(self, tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        """By a kernel."""
        tensor.view(torch.int32)[offset : offset + count].fill_(val)
        return tensor

    def _give_back(self, address: int, mapped: int) -> None:
        del self._pieces[address]
        self._handles = {key: h for key, h in self._handles.items() if key[0] != address}
        self._hold(-mapped)

    def _check_nodes(self, ranks: Sequence[int]) -> None:
        nodes = {rank // self._devices_per_node for rank in ranks}
        if len(nodes) > 1:
            raise RuntimeError(
                f"symmetric memory of a group on {len(nodes)} nodes of {self._devices_per_node} "
                "GPUs: GPUs map each other's memory within a node only. Keep the group within one"
            )


def install(devices_per_node: int, hold: Callable[[int], None]) -> None:
    """Answer for torch's class from now on; see :class:`SymmetricMemory`."""
    c10d: Any = torch._C._distributed_c10d
    c10d._SymmetricMemory = emulated = SymmetricMemory(devices_per_node, hold)

    def replace(module: Any) -> None:
        module._SymmetricMemory = emulated
        for name, argument in _CHUNKED.items():
            if hasattr(module, name):  # not in every version of torch
                setattr(module, name, _in_turns(getattr(module, name), argument))

    Watcher({"torch.distributed._symmetric_memory": replace}).begin()


def _in_turns(pipelined: Callable[..., None], argument: int) -> Callable[..., None]:
    """``pipelined`` whose chunks of a product wait for each other, whatever their streams."""

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
    """Memory at an address that no allocator handed out."""
    make: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = make(address, device, n_bytes)
    return storage
