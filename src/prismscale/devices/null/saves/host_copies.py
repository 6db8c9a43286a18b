"""Host copies of large device tensors without values: of the right size, but taking no memory.

A rank of a large model copies gigabytes to the host for each checkpoint. Their values are unknown,
so the copies are mapped and never touched: they read as zeros. A copy costs the device the time of
its transfers.
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from prismscale.devices.null.value_policy import ValueLedger

LARGE_BYTES = 1 << 20
"""Size of a large copy. Smaller copies are made as on any device: their values may be known."""
_CHUNK_BYTES = 64 << 20
"""Size of one transfer. It takes about a millisecond, so the cost of its start does not matter."""
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux; Python 3.11 has no name for it
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_MAPS = Path("/proc/self/maps")
_VALUES = "prismscale-null-values"
"""Name that ``csrc/shared_pages.cpp`` gives to files that repeat one value."""


def has_no_values(address: int) -> bool:
    """Return whether a large block of host memory is a copy of device data without values.

    Such a copy consists of pages that repeat one value.
    """
    inner = address + mmap.PAGESIZE
    with _MAPS.open() as maps:
        for line in maps:
            if _VALUES in line:
                begin, _, end = line.partition(" ")[0].partition("-")
                if int(begin, 16) <= inner < int(end, 16):
                    return True
    return False


class HostCopies:
    """Copies a device's tensors for a checkpoint. The ledger of value uses omits these reads."""

    def __init__(self, ledger: ValueLedger) -> None:
        self._ledger = ledger
        self._landing: torch.Tensor | None = None

    def unasked(self) -> AbstractContextManager[None]:
        """Omit this thread's reads in the block from the ledger: nobody asked for these values."""
        return self._ledger.silent()

    def of_tensor(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """Copy ``tensor`` to the host, as ``tensor.to("cpu")`` does."""
        with self.unasked():
            if tensor.device.type != "cuda" or tensor.nbytes < LARGE_BYTES:
                return tensor.to("cpu", non_blocking=non_blocking)
            self._transfer(tensor.detach(), non_blocking=non_blocking)
        return _mapped(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def of_storage(
        self, storage: torch.UntypedStorage, *, non_blocking: bool
    ) -> torch.UntypedStorage | None:
        """Copy a large storage of the device to the host; return None for any other storage."""
        if storage.device.type != "cuda" or storage.nbytes() < LARGE_BYTES:
            return None
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        with self.unasked():
            self._transfer(data.set_(storage), non_blocking=non_blocking)
        return _mapped(storage.nbytes()).untyped_storage()

    def _transfer(self, tensor: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy to the host in pieces, each into the same buffer."""
        if self._landing is None:
            self._landing = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        landing = self._landing.view(tensor.dtype)
        for part in tensor.contiguous().view(-1).split(landing.numel()):
            landing[: part.numel()].copy_(part, non_blocking=non_blocking)


def _mapped(n_bytes: int) -> torch.Tensor:
    """Return mapped bytes that take no memory until somebody writes to them."""
    return torch.frombuffer(mmap.mmap(-1, n_bytes, flags=_FLAGS), dtype=torch.uint8)
