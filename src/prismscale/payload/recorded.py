"""Values of captured ranks that steer the control flow of a program, kept for other ranks.

Small integer tensors steer control flow: sizes, seeds, flags, pickled objects, votes. When a
captured rank sends one (as the root of a broadcast or scatter, or point to point), its bytes go to
a folder. A rank that runs later, or at the same time, receives them from there. One file holds
one communication: a line of JSON, then the raw bytes of each tensor. Nothing is executed or
unpickled by reading it.

The file name identifies the communication: operation, group index of the group, group ranks of
sender and receiver, running number of such communications, and the sender's global rank. Object
collectives are numbered separately, because ranks may differ in how many tensors they broadcast
before. If a sender does not know its values, its file has no tensors, so that nobody waits for it.

A receiver waits for a sender that is being captured at the same time. If its own sender was not
captured, it takes the value of the same position in another group of that group index. If it runs
for more steps than its sender did, it takes the newest value that fits. It does neither if another
rule knows what a peer sends, because an older message may be about something else. If no other
source knows the objects that a group's first member broadcasts, the receiver waits for rank 0's own
broadcast: rank 0 is captured first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from prismscale.emulation.hook import Collective
from prismscale.errors import FormatError, StorageError
from prismscale.files import await_file, part_of
from prismscale.foreign import DAMAGE
from prismscale.graph.node import CollectiveOp
from prismscale.payload.tensor_bytes import tensor_bytes
from prismscale.typed_files import parse_json

_MAX_BYTES = 1 << 20
"""Larger communications are neither kept nor waited for; all members see the same size."""
_NO_VALUES = b"[]\n"
"""Content of a file whose sender does not know its values."""
_POLL_S = 0.002
PATIENCE_S = 120.0
"""How long a receiver waits for a sender that is being captured; starting up may take a minute."""
_OLDEST = 64
"""How many communications old a value may be that replaces a newer one."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
}
_RECORDED = frozenset(
    {CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.SEND, CollectiveOp.RECV}
)


class ObjectCalls(Protocol):
    """State of the object collective that is under way, if there is one."""

    @property
    def is_calling(self) -> bool:
        """Whether one is under way."""
        ...

    @property
    def knows_object(self) -> bool:
        """Whether one is under way, and a later rule knows the objects that it brings."""
        ...

    @property
    def lacks_object(self) -> bool:
        """Whether one is under way, and this rank lacks a stand-in for one of its objects."""
        ...


@dataclass(frozen=True)
class NoObjects:
    """The null implementation: no object collective is ever under way."""

    is_calling: bool = False
    knows_object: bool = False
    lacks_object: bool = False


class RecordedPayload:
    """A payload rule that keeps and finds values in a folder that captured ranks share.

    ``is_captured_now`` says whether a rank is being captured, so that what it sends will arrive.
    ``value_of`` reads a tensor that is sent; if it answers None, nothing is kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_captured_now: Callable[[int], bool] = lambda rank: False,
        value_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.detach,
        objects: ObjectCalls = NoObjects(),
    ) -> None:
        self._folder = Path(folder)
        self._is_captured_now = is_captured_now
        self._value_of = value_of
        self._objects = objects
        self._numbers: Counter[str] = Counter()
        self._folder.mkdir(parents=True, exist_ok=True)

    def offer(self, collective: Collective) -> bool:
        """As sender, keep the values and return False; as receiver, return if a recording fits."""
        op = collective.op
        if op not in _RECORDED:
            return False
        group = collective.group
        me, peer = group.group_rank, collective.root
        is_p2p = op.is_p2p
        is_sender = op is CollectiveOp.SEND or (not is_p2p and peer == me)
        sender, receiver = (me, peer) if is_sender else (peer, me)
        kind = "p2p" if is_p2p else op.spelling
        kind += ".objects" if self._objects.is_calling else ""
        target = f".d{receiver}" if is_p2p else ""
        key = f"{kind}.r{group.group_index}.s{sender}{target}"
        number = self._numbers[key]
        self._numbers[key] += 1
        tensors = collective.inputs if is_sender else collective.outputs
        # Of a scatter the receiver has one of the sender's tensors.
        n_alike = 1 if is_sender or op is not CollectiveOp.SCATTER else group.size
        if sender < 0 or not _is_small(tensors, n_alike):
            return False
        exact = self._path(key, number, group.ranks[sender])
        if is_sender:
            self._write(exact, tensors)
            return False
        position = me if op is CollectiveOp.SCATTER else 0
        member = group.ranks[sender]
        self._await(exact, member)
        if op is CollectiveOp.BROADCAST and sender == 0 and self._objects.lacks_object:
            self._await(self._path(key, number, 0), 0)
        found = self._candidates(key, number, member)
        if is_p2p and self._objects.knows_object:
            found = iter([exact] if _has_values(exact) else [])
        return any(_fill(tensors, _read(path)[position:]) for path in found)

    def _await(self, path: Path, rank: int) -> None:
        """Wait for the file of what ``rank`` sends, as long as that rank is being captured."""
        captured = self._is_captured_now
        await_file(path, PATIENCE_S, poll_s=_POLL_S, while_true=lambda: captured(rank))

    def _path(self, key: str, number: int, sender: int) -> Path:
        return self._folder / f"{key}.n{number}.g{sender}.bin"

    def _candidates(self, key: str, number: int, sender: int) -> Iterator[Path]:
        """Yield files that may answer, best first; list the folder only if the exact one fails."""
        exact, newest = self._path(key, number, sender), number
        if _has_values(exact):
            yield exact
            newest -= 1
        by_number: dict[int, list[Path]] = {}
        for path in sorted(self._folder.glob(f"{key}.n*.g*.bin")):
            by_number.setdefault(int(path.name[len(key) + 2 :].partition(".")[0]), []).append(path)
        for n in range(newest, max(number - _OLDEST, 0) - 1, -1):
            own = self._path(key, n, sender)
            recorded = [path for path in by_number.get(n, []) if _has_values(path)]
            yield from [own] if own in recorded else recorded[:1]

    def _write(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        known = [value for value in map(self._value_of, tensors) if value is not None]
        if len(known) < len(tensors):
            known = []
        header = [
            {"dtype": str(part.dtype).removeprefix("torch."), "shape": list(part.shape)}
            for part in known
        ]
        data = b"".join(map(tensor_bytes, known))
        # Not flushed to the disk, because the program waits for this.
        partial = part_of(path)
        try:
            partial.write_bytes(json.dumps(header).encode() + b"\n" + data)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _has_values(path: Path) -> bool:
    try:
        return path.stat().st_size != len(_NO_VALUES)
    except FileNotFoundError:
        return False


def _is_small(tensors: Sequence[torch.Tensor], n_alike: int) -> bool:
    """Return whether a communication of ``n_alike`` times these ``tensors`` is kept."""
    return (
        bool(tensors)
        and all(str(t.dtype).removeprefix("torch.") in _DTYPES for t in tensors)
        and not tensors[0].is_meta
        and n_alike * sum(t.nbytes for t in tensors) <= _MAX_BYTES
    )


def _read(path: Path) -> list[torch.Tensor]:
    content = path.read_bytes()
    line, _, data = content.partition(b"\n")
    tensors = []
    offset = 0
    try:
        for entry in parse_json(line.decode(), str(path)):
            dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            n_bytes = prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0:
                raise ValueError("a negative size")
            raw = bytearray(data[offset : offset + n_bytes])
            if len(raw) != n_bytes:
                raise ValueError(f"{len(raw)} bytes where {n_bytes} are announced")
            flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0)
            tensors.append(flat.to(torch.uint8).view(dtype).view(shape))
            offset += n_bytes
    except (FormatError, RuntimeError, *DAMAGE) as error:
        raise FormatError(
            f"{path} is not a recorded payload ({error}): delete the run folder's payloads and "
            "capture again"
        ) from error
    return tensors


def _fill(outputs: Sequence[torch.Tensor], recorded: Sequence[torch.Tensor]) -> bool:
    if len(recorded) < len(outputs):
        return False
    pairs = list(zip(outputs, recorded, strict=False))
    if any(out.numel() != rec.numel() or out.dtype != rec.dtype for out, rec in pairs):
        return False
    with torch._C._AutoDispatchBelowADInplaceOrView():
        for output, values in pairs:
            output.copy_(values.view(output.shape))
    return True
