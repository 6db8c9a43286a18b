"""Words in shared memory through which a device and its pacer process communicate.

The device counts in *counters* how far its streams have come. The pacer counts in *gates* how far
they may go, and in *answers* which ends are known. A word only grows, and only one side writes it,
so no lock is needed. This module does not import torch: the pacer starts fast and stays small.

[Note: why a process paces] A stream must stop at a communication without stopping the host. For how
long, nobody knows when the communication is issued: its end depends on when this rank's device
reaches it and on what the coordinator then answers. That rules out ``torch.cuda._sleep``, a kernel
whose length is set at launch (it would also hold a multiprocessor, and the time slice of another
live rank on the same GPU). A host callback in the stream (``cudaLaunchHostFunc``) can wait, but
callbacks of all streams share one thread: the first that waits holds up the rest. So a stream
writes a counter and waits for a gate (``cuStreamWriteValue32``, ``cuStreamWaitValue32``). The
GPU's command processor does both; no kernel runs.

Opening the gate must not need the interpreter lock of the rank's process. ``Event.record`` and most
extension modules keep the lock while they issue work, and issuing blocks once about a thousand
kernels wait behind a held stream. A watching *thread* would then wait for the lock and the main
thread for the gate, for ever. A process of its own has a lock of its own, and its times do not
depend on the program's work. It looks at the counters every few microseconds and takes the middle
between two looks as the time, so that the error of a time is random and does not add up.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import PrismscaleError

N_WORDS = 1024
"""Number of words of each kind. A word has 32 bits, so those of one kind fill a page."""
OPEN = 1 << 30
"""Value of a gate that holds no stream back."""


class Point(NamedTuple):
    """A value of a counter or gate. It is reached as soon as the word is at least as large."""

    word: int
    value: int


class SharedWords:
    """The counters, gates and answers in shared memory."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        table: NDArray[np.int32] = np.frombuffer(memory, dtype=np.int32).reshape(3, N_WORDS)
        self.memory = memory
        self.counters, self.gates, self.answers = table[0], table[1], table[2]

    @staticmethod
    def create(path: Path) -> SharedWords:
        """Create words in a new file, all zero."""
        path.write_bytes(bytes(3 * N_WORDS * 4))
        return SharedWords.open(path)

    @staticmethod
    def open(path: Path) -> SharedWords:
        """Open words that another process created."""
        with path.open("r+b") as file:
            return SharedWords(mmap.mmap(file.fileno(), 3 * N_WORDS * 4))


class Signals(Protocol):
    """What a device stream can do with the words, in order with the stream's other work."""

    def count(self, stream: object, point: Point) -> None:
        """Let the stream set a counter when it gets here."""
        ...

    def hold(self, stream: object, gate: Point) -> None:
        """Let the stream go no further until the gate has the value."""
        ...


class Points:
    """Hands out points. Each stream or lane has a word, and its next point is the next value."""

    def __init__(self) -> None:
        self._words: dict[object, int] = {}
        self._values: list[int] = []

    def next(self, owner: object) -> Point:
        """The owner's next point; owners are hashable."""
        word = self._words.setdefault(owner, len(self._words))
        if word >= N_WORDS:
            raise PrismscaleError(f"more than {N_WORDS} streams or communication lanes")
        if word == len(self._values):
            self._values.append(0)
        self._values[word] += 1
        return Point(word, self._values[word])


class WordKind(IntEnum):
    """Kinds of records that a live rank sends its pacer, in program order."""

    ARRIVE = 0
    """A communication of the graph is issued: ``at`` is its arrival, ``gate`` its end."""
    UNCOVERED = 1
    """The same for a communication that the graph does not have."""
    ISSUED = 2
    """The batch with this ``gate`` is complete."""
    JOIN = 3
    """A stream waits for the batch with this ``gate``, from ``at`` to its counter's next value."""
    STRETCH = 4
    """The computation before ``at`` counts ``compute_factor`` times; then ``gate`` opens."""
    STEP = 5
    """A steady step ends at ``at``."""
    END = 6
    """The program ended. The pacer answers once all records before this one are settled."""


class Record(NamedTuple):
    """One record of a live rank for its pacer."""

    kind: WordKind
    at: Point = Point(0, 0)
    gate: Point = Point(0, 0)
    position: int = 0
    group_index: int = 0
    op: int = 0
    n_bytes: int = 0
    hung: bool = False

    def pack(self) -> bytes:
        """Pack the record as :meth:`unpack` reads it."""
        tail = (self.position, self.group_index, self.op, self.n_bytes, self.hung)
        return _RECORD.pack(self.kind, *self.at, *self.gate, *tail)

    @staticmethod
    def unpack(data: bytes | bytearray) -> list[Record]:
        """Read all records in ``data``, whose length must be a multiple of :data:`RECORD_BYTES`."""
        return [
            Record(
                WordKind(kind), Point(a, m), Point(b, n), position, group_index, op, n_bytes, hung
            )
            for kind, a, m, b, n, position, group_index, op, n_bytes, hung in _RECORD.iter_unpack(
                data
            )
        ]


_RECORD = struct.Struct("<B4IQhBq?")
RECORD_BYTES = _RECORD.size
