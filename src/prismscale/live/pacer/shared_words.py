"""Words in shared memory through which a device and the process that paces it speak.

The device adds up in *counters* what its streams have reached; the pacer adds up in *gates* what
they may pass, and in *answers* what is known to end. A count only grows, and one side alone writes
each word, so nothing is ever locked. No torch here: the pacer starts fast and stays small.

[Note: why a process paces] A stream must stop at a communication without stopping the host, for a
time that nobody knows when the communication is issued: its end depends on when this rank's device
gets there and on what the coordinator then says. That rules out ``torch.cuda._sleep``, a kernel
whose length is set at launch (it would also hold a multiprocessor, and the time slice of another
live rank on the same GPU). A host callback in the stream (``cudaLaunchHostFunc``) can wait, but
callbacks of all streams share one thread: the first that waits holds up the rest. So a stream
writes a counter and waits for a gate (``cuStreamWriteValue32``, ``cuStreamWaitValue32``): the
command processor does both, no kernel runs.

Who opens the gate must not need this process's interpreter lock. ``Event.record`` and most
extension modules keep the lock while they issue work, and issuing blocks once about a thousand
kernels wait behind a held stream: a watching *thread* would then wait for the lock, the main thread
for the gate, for ever. A process of its own has a lock of its own, and its times do not depend on
what the program does. It looks at the counters every few microseconds and takes the middle between
two looks as the time, so that the error of a time is random and does not add up.
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
"""Words of each kind: 32 bits each, together one page."""
OPEN = 1 << 30
"""Value of a gate that holds nothing."""


class Point(NamedTuple):
    """A value of a counter or gate, which is reached as soon as the word is as large."""

    word: int
    value: int


class SharedWords:
    """The shared memory."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        table: NDArray[np.int32] = np.frombuffer(memory, dtype=np.int32).reshape(3, N_WORDS)
        self.memory = memory
        self.counters, self.gates, self.answers = table[0], table[1], table[2]

    @staticmethod
    def create(path: Path) -> SharedWords:
        """New words in a file, all zero."""
        path.write_bytes(bytes(3 * N_WORDS * 4))
        return SharedWords.open(path)

    @staticmethod
    def open(path: Path) -> SharedWords:
        """Words that another process created."""
        with path.open("r+b") as file:
            return SharedWords(mmap.mmap(file.fileno(), 3 * N_WORDS * 4))


class Signals(Protocol):
    """What a device stream can do with the words; each keeps its place among the stream's work."""

    def count(self, stream: object, point: Point) -> None:
        """The stream sets a counter when it gets here."""
        ...

    def hold(self, stream: object, gate: Point) -> None:
        """The stream goes no further until the gate has the value."""
        ...


class Points:
    """Hands out points: the next value of the word that stands for a stream or lane."""

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
    """What a live rank tells its pacer, in program order."""

    ARRIVE = 0
    """A communication of the graph is issued: ``at`` is its arrival, ``gate`` its end."""
    UNCOVERED = 1
    """The same for one that the graph does not have."""
    ISSUED = 2
    """The batch with this ``gate`` is complete."""
    JOIN = 3
    """A stream waits for the batch with this ``gate``: from ``at`` until the next value of its
    counter."""
    STRETCH = 4
    """The computation before ``at`` counts ``compute_factor`` times; ``gate`` lets it go on."""
    STEP = 5
    """A steady step ends at ``at``."""
    END = 6
    """The program ended; answered once everything before is settled."""


class Record(NamedTuple):
    """One thing told."""

    kind: WordKind
    at: Point = Point(0, 0)
    gate: Point = Point(0, 0)
    position: int = 0
    group_index: int = 0
    op: int = 0
    n_bytes: int = 0
    hung: bool = False

    def pack(self) -> bytes:
        """As :meth:`unpack` reads it."""
        tail = (self.position, self.group_index, self.op, self.n_bytes, self.hung)
        return _RECORD.pack(self.kind, *self.at, *self.gate, *tail)

    @staticmethod
    def unpack(data: bytes | bytearray) -> list[Record]:
        """All records in ``data``, whose length must be a multiple of :data:`RECORD_BYTES`."""
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
