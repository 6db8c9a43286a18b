"""Copies in host memory of what has no bytes: large, of the right size, and taking no memory.

A rank of a large model copies gigabytes to the host for each checkpoint. Nobody can know their
values, so they are mapped and never touched: they read as zeros. What the copy takes of the
device's time is what its transfers take.
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from prismscale.devices.null.value_policy import ValueLedger

LARGE_BYTES = 1 << 20
"""Smaller copies are made as on any device: their values may be known."""
_CHUNK_BYTES = 64 << 20
"""A transfer of this size takes about a millisecond: what starting one takes does not matter."""
_NORESERVE = 0x4000  # of Linux; Python 3.11 has no name for it
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_MAPS = Path("/proc/self/maps")
_VALUES = "prismscale-null-values"
"""What ``csrc/shared_pages.cpp`` calls files of one value."""


def has_no_values(address: int) -> bool:
    """Whether a large block of host memory is a copy of what was on the device: pages that repeat
    one value."""
    inner = address + mmap.PAGESIZE
    with _MAPS.open() as maps:
        for line in maps:
            if _VALUES in line:
                begin, _, end = line.partition(" ")[0].partition("-")
                if int(begin, 16) <= inner < int(end, 16):
                    return True
    return False


class HostCopies:
    """Copies of a device's tensors for a checkpoint. That they have no values is nobody's news."""

    def __init__(self, ledger: ValueLedger) -> None:
        self._ledger = ledger
        self._landing: torch.Tensor | None = None

    def unasked(self) -> AbstractContextManager[None]:
        """Copies that this thread makes by itself meanwhile are no questions to the device."""
        return self._ledger.silent()

    def of_tensor(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """As ``tensor.to("cpu")``."""
        with self.unasked():
            if tensor.device.type != "cuda" or tensor.nbytes < LARGE_BYTES:
                return tensor.to("cpu", non_blocking=non_blocking)
            self._transfer(tensor.detach(), non_blocking=non_blocking)
        return _mapped(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def of_storage(
        self, storage: torch.UntypedStorage, *, non_blocking: bool
    ) -> torch.UntypedStorage | None:
        """A host storage for a large one of the device; None for any other."""
        if storage.device.type != "cuda" or storage.nbytes() < LARGE_BYTES:
            return None
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        with self.unasked():
            self._transfer(data.set_(storage), non_blocking=non_blocking)
        return _mapped(storage.nbytes()).untyped_storage()

    def _transfer(self, tensor: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy to the host in pieces, each to the same place."""
        if self._landing is None:
            self._landing = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        landing = self._landing.view(tensor.dtype)
        for part in tensor.contiguous().view(-1).split(landing.numel()):
            landing[: part.numel()].copy_(part, non_blocking=non_blocking)


def _mapped(n_bytes: int) -> torch.Tensor:
    """Bytes that are there and take no memory until somebody writes to them."""
    return torch.frombuffer(mmap.mmap(-1, n_bytes, flags=_FLAGS), dtype=torch.uint8)
