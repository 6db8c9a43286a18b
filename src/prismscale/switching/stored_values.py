"""Passes values of communications on disk from the rank that gives them to those that take them.

One file holds one rank's contribution to one communication, or the result that one rank has
computed for all. It has a line of JSON with dtypes, shapes and checksums, then the bytes. Reading
it executes and unpickles nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from prismscale.errors import FormatError, StorageError
from prismscale.payload.tensor_bytes import tensor_bytes

RESULT = "result"
_ALIGNED = 64
"""Alignment of tensors in bytes; no dtype needs more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A rank's contribution to a communication, or the result of one."""

    tensors: tuple[torch.Tensor, ...]
    splits: tuple[int, ...] = ()
    """Rows for each member, for an all-to-all with uneven splits."""


class StoredValues:
    """Values of communications in a folder that all ranks of a job share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(
        self, name: str, member: int | str, tensors: Sequence[torch.Tensor], splits: Sequence[int]
    ) -> None:
        """Store what ``member`` (a global rank, or :data:`RESULT`) gives to communication ``name``.

        Raises:
            StorageError: the file cannot be written.
        """
        parts = [t.detach().cpu().contiguous() for t in tensors]
        told = [[str(p.dtype).removeprefix("torch."), list(p.shape)] for p in parts]
        sums = [_checksum(part) for part in parts]
        header = json.dumps({"tensors": told, "splits": list(splits), "sums": sums}).encode()
        header += b"\n"
        path = self._path(name, member)
        try:
            with path.open("wb") as file:
                file.write(header + b" " * (-len(header) % _ALIGNED))
                for part in parts:
                    file.write(tensor_bytes(part))
                    file.write(b"\0" * (-part.nbytes % _ALIGNED))
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror}; choose another --out, or fewer ranks"
            ) from error

    def read(self, name: str, member: int | str) -> Given:
        """Read what :meth:`write` stored. Tensors are views of the file; changes stay private.

        Raises:
            FormatError: the file is damaged or missing.
        """
        path = self._path(name, member)
        try:
            with path.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                content = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY)
            stop = content.find(b"\n") + 1
            told = json.loads(content[:stop])
            tensors = []
            offset = stop + -stop % _ALIGNED
            for (dtype_name, shape), checksum in zip(told["tensors"], told["sums"], strict=True):
                dtype, count = getattr(torch, dtype_name), torch.Size(shape).numel()
                if count == 0:
                    tensors.append(torch.empty(shape, dtype=dtype))
                    continue
                flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset)
                if _checksum(flat) != checksum:
                    raise ValueError("its checksum is another")
                tensors.append(flat.view(shape))
                offset += flat.nbytes + -flat.nbytes % _ALIGNED
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} does not hold a communication's values: {error}") from error
        return Given(tensors=tuple(tensors), splits=tuple(told["splits"]))

    def remove(self, name: str, members: Sequence[int]) -> None:
        """Delete the files of a communication."""
        for member in members:
            self._path(name, member).unlink(missing_ok=True)
        self._path(name, RESULT).unlink(missing_ok=True)

    def _path(self, name: str, member: int | str) -> Path:
        return self._folder / f"{name}.{member}"


def _checksum(part: torch.Tensor) -> int:
    return zlib.crc32(tensor_bytes(part))
