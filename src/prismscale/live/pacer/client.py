"""A live rank's end of its pacer: starts the process, reports what is issued, hears of faults."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prismscale.errors import StuckError
from prismscale.live.coordinator.wire import Wire
from prismscale.live.pacer.pacer_spec import PacerSpec
from prismscale.live.pacer.shared_words import OPEN, Point, Record, SharedWords
from prismscale.typed_files import plain

POLL_S = 20e-6
_LOOKS = 10_000
"""Polls between two looks at whether the pacer still runs."""

PACER_PROCESS = "prismscale.live.pacer.pacer_process"


class PacerLink:
    """Connection to the pacer process: shared-memory words for progress, a socket for records."""

    def __init__(
        self,
        words: SharedWords,
        connection: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._words = words
        self._connection = connection
        self._process = process
        self._lines = connection.makefile("rb")

    @staticmethod
    def start(
        path: Path, words: SharedWords, wire: Wire, origin_ns: int, compute_factor: float
    ) -> PacerLink:
        """Start the pacer of a rank. From here on it alone uses the wire to the coordinator."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        spec = PacerSpec(
            words=str(path),
            link=theirs.fileno(),
            wire=wire.fileno(),
            origin_ns=origin_ns,
            compute_factor=compute_factor,
        )
        # See [Note: why a process paces] in shared_words.py. The pacer gets no session of its own,
        # so that whoever ends this rank's session ends its pacer too.
        process = subprocess.Popen(
            [sys.executable, "-m", PACER_PROCESS, json.dumps(plain(spec))],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), wire.fileno()),
        )
        # If a copy stayed open here, this rank would not notice when the pacer ends.
        theirs.close()
        link = PacerLink(words, ours, process)
        link.hear()
        return link

    def tell(self, *records: Record) -> None:
        """Tell the pacer what was issued.

        Raises:
            StuckError: the pacer knows that the job cannot go on.
        """
        self.check()
        try:
            self._connection.sendall(b"".join(record.pack() for record in records))
        except OSError:
            # The pacer has exited. The last line it sent says why.
            self.hear()

    def check(self) -> None:
        """Raise the fault that the pacer reported, if there is one.

        Raises:
            StuckError: the job cannot go on.
        """
        # A pacer opens answers that nobody asked for only when it gives up.
        if self._words.answers[0] >= OPEN:
            self.hear()

    def is_answered(self, gate: Point) -> bool:
        """Whether the end of the batch with this gate is known."""
        return bool(self._words.answers[gate.word] >= gate.value)

    def await_answer(self, gate: Point) -> None:
        """Block the host until the end of the batch with this gate is known."""
        asked = 0
        while not self.is_answered(gate):
            time.sleep(POLL_S)
            asked += 1
            # A pacer that was killed opens no gate.
            if asked % _LOOKS == 0 and self._has_ended():
                self.hear()
        self.check()

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def hear(self) -> dict[str, Any]:
        """Wait for the next message of the pacer.

        Raises:
            StuckError: the message is a fault, or the pacer has ended.
        """
        line = self._lines.readline()
        if not line:
            raise StuckError("the process that paces this live rank ended; the rank's log says why")
        body: dict[str, Any] = json.loads(line)
        if "fault" in body:
            raise StuckError(str(body["fault"]))
        return body

    def close(self) -> None:
        """Leave: the pacer then opens every gate and ends."""
        # Close both: the socket stays open as long as the file made from it.
        self._lines.close()
        self._connection.close()
        if self._process is not None:
            self._process.wait()
