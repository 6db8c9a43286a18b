"""The recorded values of a job, by name of the communication, read ahead into a bounded pool."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from prismscale.errors import FormatError
from prismscale.payload.recordings.blob_store import BlobStore
from prismscale.payload.recordings.recording_writer import SCHEMA, blobs_of

POOL_BYTES = 256 << 20
"""Most bytes that are held of what was read ahead."""
_LATE = 64
"""A communication up to this many before the latest may still be asked for: several are under
way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTensor:
    """One tensor of a recording: its type, and where its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    @property
    def n_bytes(self) -> int:
        """Size of its values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGift:
    """One rank's contribution to a communication, or its result (:data:`.RESULT`)."""

    tensors: tuple[RecordedTensor, ...]
    splits: tuple[int, ...]


class RecordedJob:
    """Recorded communications of a job; made by :meth:`load`.

    A thread reads ahead on the channels that were asked for before, in the order in which
    communications were recorded. Values leave the pool when they are taken, or when they lie too
    far behind.
    """

    def __init__(
        self, gifts: dict[str, dict[int, RecordedGift]], blobs: BlobStore, *, pool_bytes: int
    ) -> None:
        """``gifts``: by name and rank, in the order of recording."""
        self._gifts, self._blobs, self._pool_bytes = gifts, blobs, pool_bytes
        self._names = list(gifts)
        self._order = {name: i for i, name in enumerate(gifts)}
        self._ahead: dict[tuple[int, str], bytearray] = {}
        self._ahead_bytes = 0
        self._channels: set[str] = set()
        self._last = -1
        self._change = threading.Condition()
        self._reader: threading.Thread | None = None
        self.most_ahead_bytes = 0
        """Most bytes that the pool has held."""

    @classmethod
    def load(cls, folder: Path, *, pool_bytes: int = POOL_BYTES) -> RecordedJob | None:
        """Load the recording in ``folder``; None if nothing was recorded.

        Raises:
            FormatError: a list of recorded communications is damaged.
        """
        rows = [row for path in sorted(folder.glob("index-*.arrow")) for row in _rows(path)]
        if not rows:
            return None
        gifts: dict[str, dict[int, RecordedGift]] = {}
        for _, name, member, gift in sorted(rows, key=lambda row: row[:3]):
            gifts.setdefault(name, {})[member] = gift
        return cls(gifts, BlobStore(blobs_of(folder)), pool_bytes=pool_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._gifts

    def gift(self, name: str, member: int) -> RecordedGift | None:
        """Return what a global rank, or :data:`.RESULT`, gave; None if it was not recorded."""
        return self._gifts[name].get(member)

    def tensors(self, name: str, gift: RecordedGift) -> list[torch.Tensor]:
        """Return the tensors of a gift to ``name``, and let the thread go on from there.

        Raises:
            FormatError: a tensor is missing or damaged.
        """
        at = self._order[name]
        with self._change:
            self._channels.add(_channel(name))
            self._last = max(self._last, at)
            found = [self._drop((at, t.digest)) for t in gift.tensors]
            for key in [key for key in self._ahead if key[0] < self._last - _LATE]:
                self._drop(key)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_ahead, daemon=True)
                self._reader.start()
            self._change.notify_all()
        return [
            _tensor(t, self._blobs.get(t.digest) if data is None else data)
            for t, data in zip(gift.tensors, found, strict=True)
        ]

    def _drop(self, key: tuple[int, str]) -> bytearray | None:
        data = self._ahead.pop(key, None)
        self._ahead_bytes -= len(data or b"")
        return data

    def _read_ahead(self) -> None:
        at = 0
        while True:
            with self._change:
                while not self._has_room(at := max(at, self._last + 1)):
                    self._change.wait()
                wanted = self._wanted(at)
            for digest in wanted:
                self._load(at, digest)
            at += 1

    def _wanted(self, at: int) -> dict[str, int]:
        """Return the digests, with sizes, that may be asked for of a communication."""
        name = self._names[at]
        if _channel(name) not in self._channels:
            return {}
        gifts = self._gifts[name].values()
        wanted = {t.digest: t.n_bytes for gift in gifts for t in gift.tensors}
        # A communication too large for the pool is read when it is needed.
        return wanted if sum(wanted.values()) <= self._pool_bytes else {}

    def _has_room(self, at: int) -> bool:
        if at >= len(self._names):
            return False
        return self._ahead_bytes + sum(self._wanted(at).values()) <= self._pool_bytes

    def _load(self, at: int, digest: str) -> None:
        try:
            data = self._blobs.get(digest)
        except FormatError:
            # The reader that needs it gets the error.
            return
        with self._change:
            if at > self._last:
                self._ahead[at, digest] = data
                self._ahead_bytes += len(data)
                self.most_ahead_bytes = max(self.most_ahead_bytes, self._ahead_bytes)


def _channel(name: str) -> str:
    return name.rpartition(".")[0]


def _rows(path: Path) -> Iterator[tuple[int, str, int, RecordedGift]]:
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        if table.schema.remove_metadata() != SCHEMA:
            raise ValueError("its columns are others")
        for row in table.to_pylist():
            tensors = tuple(
                RecordedTensor(dtype=_dtype(dtype), shape=tuple(shape), digest=str(digest))
                for dtype, shape, digest in json.loads(row["tensors"])
            )
            gift = RecordedGift(tensors=tensors, splits=tuple(row["splits"]))
            yield row["at_ns"], row["name"], row["member"], gift
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise FormatError(
            f"{path} is no list of recorded communications ({error}): record again with --fresh"
        ) from error


def recorded_by_selection(folder: Path) -> list[int]:
    """Return how many communications each ``--record`` covers, summed over all ranks."""
    counts: list[list[int]] = []
    for path in sorted(folder.glob("index-*.arrow")):
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            counts.append(json.loads((reader.schema.metadata or {})[b"recorded"]))
    return [sum(column) for column in zip(*counts, strict=True)]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _tensor(told: RecordedTensor, data: bytearray) -> torch.Tensor:
    if len(data) != told.n_bytes:
        raise FormatError(
            f"a recorded tensor has {len(data)} bytes where {told.n_bytes} are told: record again "
            "with --fresh"
        )
    if not data:
        return torch.empty(told.shape, dtype=told.dtype)
    return torch.frombuffer(data, dtype=told.dtype).view(told.shape)
