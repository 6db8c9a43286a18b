"""A rank's side of the protocol with :mod:`prismscale.switching.coordinator`."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from prismscale.emulation.script import StopProgram
from prismscale.errors import PrismscaleError
from prismscale.switching.spilled_memory import SpilledMemory, resident_bytes


class Questions:
    """Asks the coordinator, with one connection for each thread."""

    def __init__(self, address: str, rank: int, memory: SpilledMemory | None = None) -> None:
        """``memory``: tensors that can be written out to disk while this rank waits."""
        self._address, self._rank, self._memory = address, rank, memory
        self._looked = False
        self._threads = threading.local()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask and wait for the answer, however long it takes.

        Raises:
            StopProgram: a rank that this one waits for has ended after all wanted steps.
            PrismscaleError: the coordinator is gone.
        """
        answer = self._tell({**question, **self._takes(question)})
        while answer.get("press"):
            answer = self._tell(self._press_out())
        if answer.get("stop"):
            raise StopProgram
        return answer

    def _tell(self, question: dict[str, Any]) -> dict[str, Any]:
        connection = self._connection()
        connection.write(json.dumps(question).encode() + b"\n")
        connection.flush()
        line = connection.readline()
        if not line:
            raise PrismscaleError("the coordinator of the job's ranks is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _takes(self, question: dict[str, Any]) -> dict[str, int]:
        """Return the rank's memory for a question that may suspend it; ``base`` only once."""
        if self._memory is None or question["ask"] not in ("wait", "poll", "issue"):
            return {}
        held = self._memory.take_peak()
        if self._looked:
            return {"held": held}
        self._looked = True
        return {"held": held, "base": max(resident_bytes() - held, 0)}

    def _press_out(self) -> dict[str, Any]:
        if self._memory is not None:
            self._memory.press_out()
        return {"ask": "pressed", "base": resident_bytes()}

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
