"""Messages from live ranks to their assistants: one line of JSON for each communication.

A live rank asks for a channel's number before it first uses the channel. All live ranks get the
same number. There are no other answers.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from prismscale.errors import PrismscaleError
from prismscale.files import await_file
from prismscale.graph.node import CollectiveOp
from prismscale.payload.rules.rule import REDUCTIONS
from prismscale.transfers.schedule import Algorithm, Shape

PATIENCE_S = 60.0
_NAMES = {kind: name for name, kind in REDUCTIONS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One communication of a live rank, announced to its assistants."""

    name: str
    channel: int
    op: int
    size: int
    numel: int
    root: int
    algorithm: str
    dtype: str
    reduction: str
    receiver: int
    live: tuple[int, ...]
    index: int
    count: int
    ranks: tuple[int, ...] = ()
    """Global ranks of the group where their values were recorded; else empty, and assistants send
    zeros."""
    send_splits: tuple[int, ...] = ()
    receive_splits: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        """The communication's shape, which its schedule depends on."""
        return Shape(
            op=CollectiveOp(self.op),
            size=self.size,
            numel=self.numel,
            root=self.root,
            send_splits=self.send_splits,
            receive_splits=self.receive_splits,
            algorithm=Algorithm(self.algorithm),
        )

    @property
    def kind(self) -> Any:
        """The reduction operator."""
        return REDUCTIONS[self.reduction]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type of all elements."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def reduction_name(kind: Any) -> str:
    """Return the name of a reduction in :class:`Told`."""
    return _NAMES[kind]


class AssistantWire:
    """A live rank's connection to its assistants."""

    def __init__(self, address: Path, rank: int) -> None:
        """Connect to the assistants' socket.

        Raises:
            PrismscaleError: the assistants do not listen.
        """
        self._end = socket.socket(socket.AF_UNIX)
        if not await_file(address, PATIENCE_S, poll_s=0.005):
            raise PrismscaleError("the assistants do not listen; their log says why")
        self._end.connect(str(address))
        self._lines = self._end.makefile("rwb")
        self._lock = threading.Lock()
        self._channels: dict[str, int] = {}
        self._write({"rank": rank})

    def channel(self, name: str) -> int:
        """Return a channel's number, which is the same on all live ranks.

        Raises:
            PrismscaleError: the assistants are gone.
        """
        with self._lock:
            if name not in self._channels:
                self._write({"channel": name})
                line = self._lines.readline()
                if not line:
                    raise PrismscaleError("the assistants are gone; their log says why")
                self._channels[name] = int(line)
            return self._channels[name]

    def tell(self, told: Told) -> None:
        """Announce a communication, so that absent neighbours take part in it."""
        with self._lock:
            self._write(asdict(told))

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self._lines.write(json.dumps(message).encode() + b"\n")
            self._lines.flush()
        except OSError as error:
            raise PrismscaleError("the assistants are gone; their log says why") from error


def heard(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | Told]:
    """Parse a live rank's messages: its rank, requests for channels, and its communications."""
    for line in lines:
        message = json.loads(line)
        if "name" in message:
            fields: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in message.items()
            }
            yield Told(**fields)
        else:
            yield message
