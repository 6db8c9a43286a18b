"""``torch.save`` on the null device: files of full size that take hardly any disk space.

Programs rename, link and load what they saved, so a file must exist, and with its real size. But
data from the device has no values: in the file it is a hole, which reads as zeros. Data that the
program made on the host is written as it is. Writing takes the time that
:class:`~prismscale.devices.storage.Storage` says, unless a thread does it beside the program.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from prismscale.devices.null.saves.host_copies import LARGE_BYTES, HostCopies, has_no_values
from prismscale.emulation.background import is_background

Opener = Callable[[Any], AbstractContextManager[Any]]
"""Makes torch's writer of records for a path or a file."""
Wrote = Callable[..., None]
"""Takes a file's size in bytes, and ``is_async``: whether the program ran on during the write."""


def saving_hollow(original: Opener, copies: HostCopies, wrote: Wrote) -> Opener:
    """Return a ``torch.serialization._open_zipfile_writer`` that leaves out data without values."""

    @contextmanager
    def opened(target: Any) -> Iterator[Any]:
        with _binary(target) as file, copies.unasked(), unchecked():
            hollow = HollowFile(file)
            with original(hollow) as writer:
                yield HollowRecords(writer, hollow)
        if hollow.n_bytes >= LARGE_BYTES:
            is_beside = threading.current_thread() is not threading.main_thread()
            wrote(hollow.n_bytes, is_async=is_beside or is_background())

    def _open_zipfile_writer(target: Any) -> AbstractContextManager[Any]:
        return opened(target) if _is_on_disk(target) else original(target)

    return _open_zipfile_writer


@contextmanager
def unchecked() -> Iterator[None]:
    """Let torch write no checksums in the block, because it would read every byte for them."""
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(checked)


class HollowFile(io.RawIOBase):
    """A writable file that can leave holes in place of the data that it is given."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.is_left_out = False
        """Whether blocks of at least ``LARGE_BYTES`` become holes."""
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        """Write ``data``, or skip as many bytes."""
        n_bytes = memoryview(data).nbytes
        if self.is_left_out and n_bytes >= LARGE_BYTES:
            self._file.seek(n_bytes, os.SEEK_CUR)
        else:
            self._file.write(data)
        self.n_bytes += n_bytes
        return n_bytes

    def writable(self) -> bool:
        """Return True."""
        return True

    def flush(self) -> None:
        """Flush the underlying file."""
        self._file.flush()


class HollowRecords:
    """Wraps torch's writer of a file's records, which are one storage each."""

    def __init__(self, writer: Any, file: HollowFile) -> None:
        self._writer = writer
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
        """Write a record. A large one without values becomes a hole."""
        is_large = isinstance(data, torch.UntypedStorage) and n_bytes >= LARGE_BYTES
        self._file.is_left_out = is_large and has_no_values(data.data_ptr())
        try:
            self._writer.write_record(name, data, n_bytes)
        finally:
            self._file.is_left_out = False


def _is_on_disk(target: Any) -> bool:
    """Return whether ``target`` is a path in an existing folder, or an open file on disk."""
    if isinstance(target, str | os.PathLike):
        return Path(target).parent.is_dir()
    try:
        return not isinstance(target, io.RawIOBase) and stat.S_ISREG(
            os.fstat(target.fileno()).st_mode
        )
    except (AttributeError, OSError, TypeError):
        return False


@contextmanager
def _binary(target: Any) -> Iterator[Any]:
    if isinstance(target, str | os.PathLike):
        with Path(target).open("wb") as file:
            yield file
    else:
        yield target
