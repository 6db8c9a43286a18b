"""Streams that are held, on a stand-in for CUDA's: the pacer is the real one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from prismscale.live.pacer.shared_words import Point, SharedWords
from prismscale.measure.held_streams import measure_held, paced


@dataclass
class HostEvent:
    """When the host saw a stream come to a point; 0 while it is held."""

    at_ns: int = 0


class HostStreams:
    """One stream that the host runs: it is held until somebody synchronizes."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._gate: Point | None = None
        self.passed: list[Point] = []

    def create(self) -> HostStreams:
        return self

    def record(self, stream: object) -> HostEvent:
        return HostEvent(time.perf_counter_ns() if self._gate is None else 0)

    def count(self, stream: object, point: Point) -> None:
        self._words.counters[point.word] = point.value

    def hold(self, stream: object, gate: Point) -> None:
        self._gate = gate

    def synchronize(self, event: HostEvent) -> None:
        assert self._gate is not None
        while self._words.gates[self._gate.word] < self._gate.value:
            time.sleep(0)
        event.at_ns = time.perf_counter_ns()
        self.passed.append(self._gate)
        self._gate = None

    def elapsed_ns(self, began: HostEvent, ended: HostEvent) -> int:
        return ended.at_ns - began.at_ns


def test_a_stream_is_held_as_often_as_asked(tmp_path: Path) -> None:
    """Each time at the next value of its gate, for each of the times."""
    words = SharedWords.create(tmp_path / "words")
    streams = HostStreams(words)
    with paced(tmp_path / "words", words, streams, streams) as held:
        figures = measure_held(held, asked_ns=(50_000, 1_000_000), repeats=3)
    assert figures.asked_ns == (50_000, 1_000_000)
    assert [len(late) for late in figures.late_us] == [3, 3]
    assert [gate.value for gate in streams.passed] == [1, 2, 3, 4, 5, 6]
