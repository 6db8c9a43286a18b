"""Holds a rank between two steps until it may go on.

Benchmarks interleave the steps of a real and an emulated run on one machine: only then do both see
the same temperature, neighbours and clock frequency. The time spent here is in nobody's step.
"""

from __future__ import annotations

import socket


class SocketGate:
    """Says on a local socket that a step ended, and waits for one byte."""

    def __init__(self, path: str, name: str) -> None:
        """Connect to the keeper at ``path`` as ``name`` (one line)."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(path)
        self._connection.sendall(name.encode() + b"\n")

    def hold(self) -> None:
        """Report, then wait for the keeper; a keeper that went away holds nobody."""
        try:
            self._connection.sendall(b".")
            self._connection.recv(1)
        except OSError:
            return
