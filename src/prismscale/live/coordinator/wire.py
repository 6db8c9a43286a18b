"""Messages between live ranks and the coordinator: fixed binary records on a local socket."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from prismscale.errors import FormatError

_HEADER = struct.Struct("<BQqqI")
"""Kind, position, time (ns), computation (ns), number of bytes of JSON text that follow."""
MAX_TEXT = 1 << 20
_PEER = struct.Struct("3i")
"""Ids of the process, user and group."""

ASK_AFTER_S = 5.0
"""If a communication lasts this long, the rank asks whether it ever ends."""
UNCOVERED_ID_BASE = 1 << 62
"""First number of communications that the trace does not contain."""


class MessageKind(IntEnum):
    """Meaning of a message; ``position`` is a stream position in the live rank's trace."""

    HELLO = 0
    """Live rank → coordinator: ready to run; ``position`` is the rank."""
    GO = 1
    """Coordinator → all: the job begins at ``time_ns`` of the monotonic clock.

    The text lists the processes of the other live ranks.
    """
    ARRIVE = 2
    """Live rank → coordinator: the rank reached communication ``position`` at ``time_ns``.

    Since the communication before, it computed for ``computed_ns`` on this machine.
    """
    RELEASE = 3
    """Coordinator → live rank: communication ``position`` ends at ``time_ns``."""
    UNCOVERED = 4
    """Live rank → coordinator: a communication that the graph does not have; text describes it.
    Answered by RELEASE with the same ``position``."""
    WHY = 5
    """Live rank → coordinator: the rank asks whether ``position`` ever ends: it still waits."""
    FAULT = 6
    """Coordinator → live rank: the communication never ends; the text says why."""
    BYE = 7
    """Live rank → coordinator: the program ended."""
    COMPUTED = 8
    """Live rank → coordinator: a step ended; it held ``time_ns`` of computation on this machine."""


@dataclass(frozen=True, slots=True)
class Message:
    """One record."""

    kind: MessageKind
    position: int = 0
    time_ns: int = 0
    text: dict[str, Any] | None = None
    computed_ns: int = 0


def _packed(message: Message) -> bytes:
    text = json.dumps(message.text).encode() if message.text is not None else b""
    header = _HEADER.pack(
        message.kind, message.position, message.time_ns, message.computed_ns, len(text)
    )
    return header + text


class Wire:
    """Messages over one stream socket.

    [Note: who reads] The coordinator must not wait for a live rank that computes and reads nothing:
    other ranks need answers meanwhile, and a rank that sends much before it reads would wait for
    the coordinator in turn. So the coordinator keeps what does not fit into the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.connection.fileno()

    @property
    def process(self) -> int | None:
        """The process that was at the other end when the two connected; Linux only."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        told = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, _, _ = _PEER.unpack(told)
        return int(pid)

    def send(self, message: Message) -> None:
        """Send one message; raises OSError when the other side is gone."""
        self.connection.sendall(_packed(message))

    def post(self, message: Message) -> None:
        """Send one message, or keep what does not fit now; see [Note: who reads].

        Raises OSError when the other side is gone.
        """
        self._unsent += _packed(message)
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as it fits; raises OSError when the other side is gone."""
        while self._unsent:
            try:
                sent = self.connection.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    @property
    def has_unsent(self) -> bool:
        """Whether messages are kept until they fit."""
        return bool(self._unsent)

    def receive(self, timeout_s: float | None) -> list[Message] | None:
        """Read messages; wait for the first at most ``timeout_s`` (None: for ever).

        Returns an empty list on time-out and None when the other side closed.
        """
        ready, _, _ = select.select([self.connection], [], [], timeout_s)
        return self.read() if ready else []

    def read(self) -> list[Message] | None:
        """Read messages from a socket that is ready; None when the other side closed."""
        chunk = self.connection.recv(1 << 16)
        if not chunk:
            return None
        self._buffer += chunk
        return list(self._parse())

    def _parse(self) -> Iterator[Message]:
        while len(self._buffer) >= _HEADER.size:
            kind, position, time_ns, computed_ns, length = _HEADER.unpack_from(self._buffer)
            if length > MAX_TEXT:
                raise FormatError(f"a message of {length} bytes on the coordinator's socket")
            if len(self._buffer) < _HEADER.size + length:
                return
            raw = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            text = json.loads(raw) if raw else None
            yield Message(MessageKind(kind), position, time_ns, text, computed_ns)
