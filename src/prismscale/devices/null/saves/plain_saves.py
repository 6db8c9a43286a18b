"""``torch.save`` on the null device: files as large as they are there, which hardly take any disk.

Programs rename, link and load what they saved, so a file has to be there, and of its size. But
what comes from the device has no values: in the file it is a hole, which reads as zeros. What the
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
"""torch's: makes a writer of records of a path or a file."""
Wrote = Callable[..., None]
"""Takes the bytes of a file, and whether the program went on meanwhile (``is_async``)."""


def saving_hollow(original: Opener, copies: HostCopies, wrote: Wrote) -> Opener:
    """``torch.serialization._open_zipfile_writer`` that leaves out what has no values."""

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
    """torch writes no checksums meanwhile: it would read every byte for them."""
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(checked)


class HollowFile(io.RawIOBase):
    """A file to write to that can leave out what it is given."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.is_left_out = False
        """Whether large blocks become holes."""
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        """Write, or go on behind it."""
        n_bytes = memoryview(data).nbytes
        if self.is_left_out and n_bytes >= LARGE_BYTES:
            self._file.seek(n_bytes, os.SEEK_CUR)
        else:
            self._file.write(data)
        self.n_bytes += n_bytes
        return n_bytes

    def writable(self) -> bool:
        """Yes."""
        return True

    def flush(self) -> None:
        """Of the file."""
        self._file.flush()


class HollowRecords:
    """torch's writer of a file's records, one storage each."""

    def __init__(self, writer: Any, file: HollowFile) -> None:
        self._writer = writer
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
        """Write a record; one that has no values as a hole."""
        is_large = isinstance(data, torch.UntypedStorage) and n_bytes >= LARGE_BYTES
        self._file.is_left_out = is_large and has_no_values(data.data_ptr())
        try:
            self._writer.write_record(name, data, n_bytes)
        finally:
            self._file.is_left_out = False


def _is_on_disk(target: Any) -> bool:
    """Whether ``target`` is a path whose folder is there, or an open file of the disk."""
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
