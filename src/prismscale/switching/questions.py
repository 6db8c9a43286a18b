"""What a rank asks its job's coordinator: see :mod:`prismscale.switching.coordinator`."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from prismscale.emulation.script import StopProgram
from prismscale.errors import PrismscaleError


class Questions:
    """One connection for each thread that asks."""

    def __init__(self, address: str, rank: int) -> None:
        self._address, self._rank = address, rank
        self._threads = threading.local()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer, however long it takes.

        Raises:
            StopProgram: whom this rank waits for has ended, having shown enough.
            PrismscaleError: the coordinator is gone.
        """
        connection = self._connection()
        connection.write(json.dumps(question).encode() + b"\n")
        connection.flush()
        line = connection.readline()
        if not line:
            raise PrismscaleError("the coordinator of the job's ranks is gone")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("stop"):
            raise StopProgram
        return answer

    def _connection(self) -> Any:
        connection = getattr(self._threads, "connection", None)
        if connection is None:
            end = socket.socket(socket.AF_UNIX)
            end.connect(self._address)
            connection = end.makefile("rwb")
            # The first line says whose connection this is.
            connection.write(json.dumps({"rank": self._rank}).encode() + b"\n")
            self._threads.connection = connection
        return connection
