"""Measures how late held streams go on: ``python -m prismscale.measure.held_streams OUT WORDS``.

Writes :class:`.HeldFigures` to ``OUT``; ``WORDS`` is a new file in shared memory. The stream is
held like those of a live rank, by a pacer that is told when to let it go on. CUDA events show when
it did.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prismscale.devices.cuda import CudaStreams, start_cuda
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.live.pacer.client import PacerLink
from prismscale.live.pacer.cuda_words import CudaSignals
from prismscale.live.pacer.shared_words import Points, Record, SharedWords, Signals, WordKind
from prismscale.measure.gpu_figures import HeldFigures
from prismscale.processes.children import die_with_parent
from prismscale.typed_files import save_json

ASKED_NS = (50_000, 200_000, 1_000_000, 10_000_000, 50_000_000)
REPEATS = 100


@dataclass(kw_only=True)
class HeldStream:
    """A stream, the signals that hold it, and both connections of the pacer that lets it go on."""

    streams: Any
    """Has the methods of :class:`.CudaStreams`."""
    signals: Signals
    link: PacerLink
    coordinator: Wire
    _counters: Points = field(default_factory=Points)
    _gates: Points = field(default_factory=Points)
    _position: int = 0

    def __post_init__(self) -> None:
        self._stream = self.streams.create()

    def late_ns(self, asked_ns: int) -> int:
        """Hold the stream for ``asked_ns``, and return how much longer it was held, in ns."""
        self._position += 1
        at, gate = self._counters.next(0), self._gates.next(0)
        arrive = Record(WordKind.ARRIVE, at=at, gate=gate, position=self._position)
        self.link.tell(arrive, Record(WordKind.ISSUED, gate=gate))
        began = self.streams.record(self._stream)
        self.signals.count(self._stream, at)
        self.signals.hold(self._stream, gate)
        ended = self.streams.record(self._stream)
        arrived = (self.coordinator.receive(None) or [])[0]
        end_ns = arrived.time_ns + asked_ns
        self.coordinator.send(Message(MessageKind.RELEASE, self._position, end_ns))
        self.streams.synchronize(ended)
        return int(self.streams.elapsed_ns(began, ended)) - asked_ns


def measure_held(
    held: HeldStream, asked_ns: Sequence[int] = ASKED_NS, repeats: int = REPEATS
) -> HeldFigures:
    """Hold the stream ``repeats`` times for each of the asked times."""
    late = (tuple(held.late_ns(asked) / 1e3 for _ in range(repeats)) for asked in asked_ns)
    return HeldFigures(asked_ns=tuple(asked_ns), late_us=tuple(late))


@contextmanager
def paced(path: Path, words: SharedWords, signals: Signals, streams: Any) -> Iterator[HeldStream]:
    """Provide a stream and its pacer, which ends with the block."""
    rank_end, coordinator_end = socket.socketpair()
    with rank_end, coordinator_end:
        link = PacerLink.start(path, words, Wire(rank_end), 0, 1.0)
        coordinator = Wire(coordinator_end)
        try:
            yield HeldStream(streams=streams, signals=signals, link=link, coordinator=coordinator)
        finally:
            link.close()


def main() -> None:
    """Measure and write the figures."""
    die_with_parent()
    out, path = map(Path, sys.argv[1:])
    start_cuda()
    words = SharedWords.create(path)
    with paced(path, words, CudaSignals(words), CudaStreams()) as held:
        save_json(measure_held(held), out)


if __name__ == "__main__":
    main()
