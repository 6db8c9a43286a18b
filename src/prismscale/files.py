"""Writes files whole or not at all, and explains a failure in a sentence.

Every file is written under a temporary name in its final folder, forced to the disk, and then
renamed. So a full disk or a killed process never leaves half a file under the final name, and no
reader sees one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

# Imported by name, because a program's ``time`` module may answer logical time.
from time import monotonic, sleep
from typing import BinaryIO

from prismscale.errors import StorageError

_MENDS = {
    errno.ENOSPC: "free some space there or choose another folder",
    errno.EDQUOT: "your quota there is used up: free some space or choose another folder",
    errno.EFBIG: "the size of a file is limited there (see `ulimit -f`): raise it",
    errno.EACCES: "you may not write there: choose another folder or change its permissions",
    errno.EPERM: "you may not write there: choose another folder or change its permissions",
    errno.EROFS: "that file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of that path is a file: choose another folder",
    errno.EEXIST: "a part of that path is a file: choose another folder",
    errno.EISDIR: "a folder has that name: remove it or choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def user_cache() -> Path:
    """Return the folder that all runs of a user share.

    It is ``$XDG_CACHE_HOME/prismscale`` or ``~/.cache/prismscale``.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prismscale"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing bytes; it appears, whole, when the block ends without an exception.

    Missing folders are created. After any exception an existing file is unchanged.

    Raises:
        StorageError: no space, no permission, or a name that cannot be used.
    """
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            yield file
            file.flush()
            # Sync before the rename, which could otherwise reach the disk before the bytes.
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        # The block itself may raise errors about other files.
        if error.filename not in (None, str(path), str(part), str(path.parent)):
            raise
        raise _storage_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """Return a unique temporary name beside ``path``."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")


def await_file(
    path: Path, patience_s: float, *, poll_s: float, while_true: Callable[[], bool] = lambda: True
) -> bool:
    """Wait until a file of another process exists; return whether it does.

    The wait ends without the file after ``patience_s`` seconds, or when ``while_true`` answers
    False. A file that is still being written does not exist yet: see :func:`atomic_write`.
    """
    deadline = monotonic() + patience_s
    while not path.exists():
        if monotonic() > deadline or not while_true():
            return False
        sleep(poll_s)
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes that lock ``path``, on this machine or another, from doing so meanwhile.

    The lock is a file beside it, which stays. Raises :class:`StorageError`.
    """
    lock = path.with_name(f".{path.name[:100]}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _storage_error(path, error) from error
    try:
        # A file system without locks: then whoever writes last wins.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_parts(folder: Path) -> None:
    """Remove unfinished files of ended processes from ``folder``. Raises OSError."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all. Raises :class:`StorageError`.

    Undecodable bytes of a path or an argument, which are half of a surrogate pair, are escaped.
    """
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises :class:`StorageError`."""
    with atomic_write(path) as file:
        file.write(content)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON with a final newline. Raises :class:`StorageError`.

    See :func:`write_text`.
    """
    # A backslash and four hexadecimal digits are also how JSON writes what is no character.
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _sync_folder(folder: Path) -> None:
    # A rename is only durable once the folder that records it is on the disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    mend = _MENDS.get(error.errno or 0, "check the disk and the path")
    return StorageError(f"{path} was not written: {reason} ({_free(path.parent)}); {mend}")


def _free(folder: Path) -> str:
    """Describe the free space on the disk where ``folder`` is, or would be."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(place).free / 1e9:.1f} GB free"
    return "free space unknown"
