"""Which pickled objects a rank may unpickle: those that this user's own ranks have pickled.

torch unpickles what an object collective receives, and a pickle can call any function. What arrives
may come out of a file of the run folder: a recording, or what a rank sent when it was captured.
Digests in the same folder prove nothing, because whoever changed the bytes changes them too.

[Note: marks] Every rank leaves a *mark* of each object that it pickles: the HMAC-SHA256 of the
bytes under a key that this user has outside of all run folders (mode 0600, made when it is first
needed). Before torch unpickles anything, the same is computed of what has arrived, and must be
among the marks of the job's ranks. A folder of somebody else's, or bytes that were changed, have
none. The user may say that the folder is to be trusted.
"""

from __future__ import annotations

import ctypes
import functools
import hmac
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from prismscale.devices.rank_spec import RankSpec
from prismscale.emulation.call_site import call_site
from prismscale.emulation.install import rebound
from prismscale.errors import StorageError, UsageError
from prismscale.files import user_cache

MOST_MARKS = 1 << 18
"""Of one rank: 17 MB."""
_KEY_BYTES = 32
_SUFFIX = ".marks"


def user_key() -> bytes:
    """The key of this user, on this machine.

    Raises:
        StorageError: it cannot be made or read.
        UsageError: others may read it.
    """
    path = user_cache() / "objects.key"
    try:
        if not path.exists():
            _make_key(path)
        told = path.stat()
        if told.st_uid != os.geteuid() or told.st_mode & 0o077 or told.st_size != _KEY_BYTES:
            raise UsageError(
                f"{path} is a key that nobody else may read: remove it, and a new one is made "
                "(recordings that were made before must then be made again)"
            )
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot make or read {path}: {error.strerror}") from error


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    try:
        # Of several ranks that make one at a time, the first one's is everybody's.
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


class ObjectMarks:
    """The marks of a job's ranks, in a folder that they share."""

    def __init__(self, folder: Path, rank: int, *, trusted: bool = False) -> None:
        """``rank``: whose objects are marked here; ``trusted``: whatever arrives may be
        unpickled."""
        self._folder, self._trusted = folder, trusted
        self._path = folder / f"objects-{rank}{_SUFFIX}"
        self._known: set[str] = set()
        self._made = 0

    def add(self, pickled: bytes) -> None:
        """Mark what this rank has pickled, before anybody can have it.

        Raises:
            StorageError: the mark cannot be written.
        """
        mark = self._mark(pickled)
        if mark in self._known or self._made >= MOST_MARKS:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                # One write, so that processes of the same rank do not mix their lines.
                file.write(f"{mark}\n")
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        self._known.add(mark)
        self._made += 1

    def refuse_unknown(self, pickled: bytes) -> None:
        """Let only what has a mark be unpickled.

        Raises:
            UsageError: nobody of this user's has pickled it.
        """
        if self._trusted:
            return
        mark = self._mark(pickled)
        if mark not in self._known:
            self._read()
        if mark not in self._known:
            raise UsageError(
                f"{call_site()} receives an object of {len(pickled):,} bytes that no rank of yours "
                "has pickled: the run folder is of another user or machine, or was changed, and "
                "to unpickle the object would execute whatever it says. Run again with --fresh, or "
                "with --trust-objects if you trust whoever made the folder"
            )

    def _read(self) -> None:
        for path in self._folder.glob(f"objects-*{_SUFFIX}"):
            try:
                with path.open() as file:
                    self._known.update(map(str.strip, file.readlines(MOST_MARKS * 65)))
            except (OSError, UnicodeDecodeError):
                # What cannot be read marks nothing.
                continue

    @functools.cached_property
    def _key(self) -> bytes:
        return user_key()

    def _mark(self, pickled: bytes) -> str:
        # Pickles end with a dot; zeros behind it come of ranks that agree on a length.
        return hmac.digest(self._key, pickled.rstrip(b"\0"), "sha256").hex()


def marks_of(spec: RankSpec) -> ObjectMarks:
    """Of the rank that ``spec`` describes, among those of its job."""
    return ObjectMarks(Path(spec.payloads), spec.rank, trusted=spec.trusts_objects)


@contextmanager
def marked_objects(marks: ObjectMarks) -> Iterator[None]:
    """Meanwhile torch marks what it pickles, and unpickles only what is marked."""
    pickling: Any = distributed_c10d._object_to_tensor
    unpickling: Any = distributed_c10d._tensor_to_object
    with ExitStack() as undo:
        for function in (_marking(pickling, marks), _refusing(unpickling, marks)):
            undo.enter_context(rebound(function.__name__, function))
        yield


def _marking(original: Callable[..., Any], marks: ObjectMarks) -> Callable[..., Any]:
    @functools.wraps(original)
    def _object_to_tensor(*arguments: Any) -> Any:
        pickled, size = original(*arguments)
        marks.add(_bytes(pickled))
        return pickled, size

    return _object_to_tensor


def _refusing(original: Callable[..., Any], marks: ObjectMarks) -> Callable[..., Any]:
    @functools.wraps(original)
    def _tensor_to_object(tensor: Any, tensor_size: Any, *rest: Any) -> Any:
        # Once as bytes: what is looked at is what torch unpickles.
        pickled = _bytes(tensor)[: int(tensor_size)]
        marks.refuse_unknown(pickled)
        return original(tensor, tensor_size, *rest)

    return _tensor_to_object


def _bytes(tensor: torch.Tensor) -> bytes:
    here = tensor.cpu().contiguous()
    # Not through NumPy: torch cannot resize a tensor any more whose memory NumPy has seen.
    return ctypes.string_at(here.data_ptr(), here.numel()) if here.numel() else b""
