"""A folder of byte strings by their SHA-256, of bounded size, shared by processes.

Equal byte strings are stored once. A file gets its name only when it is complete. Every read is
checked against the name, so damage is noticed.
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

from prismscale.errors import FormatError, StorageError
from prismscale.files import part_of

LIMIT_BYTES = 16 << 30


class BlobStore:
    """Stores byte strings by digest."""

    def __init__(self, folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    def put(self, data: memoryview | bytes) -> str:
        """Keep ``data`` and return its digest.

        Raises:
            StorageError: the store would exceed its limit, or cannot be written.
        """
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._take_room(len(data))
                partial = part_of(path)
                partial.write_bytes(data)
                partial.replace(path)
        except OSError as error:
            raise StorageError(
                f"cannot record to {self._folder}: {error.strerror}; record fewer communications "
                "(--record), or choose another --out"
            ) from error
        return digest

    def get(self, digest: str) -> bytearray:
        """Return the byte string of a digest.

        Raises:
            FormatError: the byte string is missing or damaged.
        """
        path = self._path(digest)
        try:
            data = bytearray(path.read_bytes())
        except OSError as error:
            raise FormatError(
                f"{path} cannot be read: {error.strerror}; record again with --fresh"
            ) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise FormatError(f"{path} is damaged: record again with --fresh")
        return data

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest[2:]

    def _take_room(self, n_bytes: int) -> None:
        """Add ``n_bytes`` to the total that all processes have written; raise above the limit."""
        counter = self._folder / "bytes"
        with counter.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            used = int(file.read() or b"0") + n_bytes
            if used > self._limit_bytes:
                raise StorageError(
                    f"recordings in {self._folder} would exceed {self._limit_bytes / 1e9:.1f} GB: "
                    "record fewer communications (--record 'group=tp,step=3'), or give "
                    "--record-limit"
                )
            file.truncate(0)
            file.write(str(used).encode())
