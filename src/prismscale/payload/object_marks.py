"""Lets a rank unpickle only objects that this user's own ranks have pickled.

torch unpickles what an object collective receives, and a pickle can call any function. The bytes
may come from a file of the run folder: a recording, or what a rank sent when it was captured.
Digests in the same folder prove nothing, because whoever changes the bytes can change them too.

[Note: marks] Every rank leaves a *mark* of each object that it pickles: the HMAC-SHA256 of the
bytes under a key that this user keeps outside all run folders (mode 0600, made when it is first
needed). Before torch unpickles anything, the mark of the received bytes is computed, and it must be
among the marks of the job's ranks. The objects of another user's folder, and bytes that were
changed, have no mark. The user may declare that the folder is to be trusted.
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
"""Most marks that one rank leaves: 17 MB."""
_KEY_BYTES = 32
_SUFFIX = ".marks"


def user_key() -> bytes:
    """Return the key of this user on this machine; make it if there is none.

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
        # If several ranks make a key at the same time, all use the first one's.
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


class ObjectMarks:
    """The marks of a job's ranks, in a folder that they share."""

    def __init__(self, folder: Path, rank: int, *, trusted: bool = False) -> None:
        """``rank``: whose objects are marked here; ``trusted``: anything may be unpickled."""
        self._folder, self._trusted = folder, trusted
        self._path = folder / f"objects-{rank}{_SUFFIX}"
        self._known: set[str] = set()
        self._made = 0

    def add(self, pickled: bytes) -> None:
        """Mark an object that this rank has pickled, before any rank can receive it.

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
        """Raise unless ``pickled`` has a mark and may therefore be unpickled.

        Raises:
            UsageError: no rank of this user has pickled it.
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
                # A file that cannot be read contributes no marks.
                continue

    @functools.cached_property
    def _key(self) -> bytes:
        return user_key()

    def _mark(self, pickled: bytes) -> str:
        # A pickle ends with a dot; zeros after it are padding to the agreed length.
        return hmac.digest(self._key, pickled.rstrip(b"\0"), "sha256").hex()


def marks_of(spec: RankSpec) -> ObjectMarks:
    """Return the marks of the rank that ``spec`` describes, in the folder of its job."""
    return ObjectMarks(Path(spec.payloads), spec.rank, trusted=spec.trusts_objects)


@contextmanager
def marked_objects(marks: ObjectMarks) -> Iterator[None]:
    """While the block runs, torch marks what it pickles and unpickles only what is marked."""
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
        # The check sees exactly the bytes that torch unpickles.
        pickled = _bytes(tensor)[: int(tensor_size)]
        marks.refuse_unknown(pickled)
        return original(tensor, tensor_size, *rest)

    return _tensor_to_object


def _bytes(tensor: torch.Tensor) -> bytes:
    here = tensor.cpu().contiguous()
    # Not through NumPy: torch can no longer resize a tensor whose memory NumPy has seen.
    return ctypes.string_at(here.data_ptr(), here.numel()) if here.numel() else b""
