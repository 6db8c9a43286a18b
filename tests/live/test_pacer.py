"""What a live rank's pacer does with words, records and gates."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.errors import StuckError
from prismscale.graph.node import CollectiveOp
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.live.pacer.client import PacerLink
from prismscale.live.pacer.counters import ContiguousPrefix, CounterTimes
from prismscale.live.pacer.shared_words import Point, Points, Record, SharedWords, WordKind

POINTS = st.builds(Point, st.integers(0, 1023), st.integers(0, 2**31 - 1))
RECORDS = st.builds(
    Record,
    st.sampled_from(WordKind),
    at=POINTS,
    gate=POINTS,
    position=st.integers(0, 2**63),
    group_index=st.integers(0, 2**15 - 1),
    op=st.sampled_from(CollectiveOp).map(int),
    n_bytes=st.integers(0, 2**62),
)


class TestSignals:
    @settings(deadline=None)
    @given(st.permutations(range(1, 9)))
    def test_gate_opens_without_gaps(self, order: list[int]) -> None:
        """A later point opens a gate only when all earlier ones have."""
        words = SharedWords(bytearray(3 * 1024 * 4))
        gates, passed = ContiguousPrefix(words.gates), set()
        for value in order:
            gates.pass_(Point(3, value))
            passed.add(value)
            assert words.gates[3] == next(n for n in range(9) if n + 1 not in passed)

    @settings(deadline=None)
    @given(st.lists(RECORDS))
    def test_records_survive_the_way(self, records: list[Record]) -> None:
        """What the rank packs the pacer unpacks."""
        assert Record.unpack(b"".join(r.pack() for r in records)) == records

    def test_time_of_a_counter_is_between_two_looks(self) -> None:
        """The middle of the interval in which it changed."""
        words = SharedWords(bytearray(3 * 1024 * 4))
        times = CounterTimes(words)
        times.look(1000)
        words.counters[2] = 2
        times.look(1600)
        assert [times.at(Point(2, n)) for n in (1, 2, 3)] == [1300, 1300, None]

    def test_owner_keeps_its_word(self) -> None:
        """Points of one stream count up in one word, another stream has another."""
        points = Points()
        assert [points.next(o) for o in "aba"] == [Point(0, 1), Point(1, 1), Point(0, 2)]


@pytest.fixture
def pacer_process(tmp_path: Path) -> Iterator[tuple[PacerLink, SharedWords, Wire]]:
    """A pacer as a live rank starts it, with the coordinator's end of its wire."""
    words = SharedWords.create(tmp_path / "words")
    rank_end, coordinator_end = socket.socketpair()
    link = PacerLink.start(tmp_path / "words", words, Wire(rank_end), 0, 1.0)
    rank_end.close()
    yield link, words, Wire(coordinator_end)
    link.close()
    coordinator_end.close()


def hear_one(wire: Wire) -> Message:
    messages = wire.receive(10.0)
    assert messages
    return messages[0]


class TestPacerProcess:
    def test_counter_arrival_release_gate(
        self, pacer_process: tuple[PacerLink, SharedWords, Wire]
    ) -> None:
        """A counter makes the pacer report, the coordinator's answer makes it open the gate."""
        link, words, wire = pacer_process
        gate = Point(4, 1)
        link.tell(Record(WordKind.ARRIVE, at=Point(0, 1), gate=gate, position=7))
        link.tell(Record(WordKind.ISSUED, gate=gate))
        words.counters[0] = 1
        arrived = hear_one(wire)
        assert (arrived.kind, arrived.position) == (MessageKind.ARRIVE, 7)
        assert words.gates[4] == 0
        wire.send(Message(MessageKind.RELEASE, 7, arrived.time_ns))
        link.await_answer(gate)
        words.counters[1] = 1
        link.tell(Record(WordKind.STEP, at=Point(1, 1)), Record(WordKind.END))
        assert len(link.hear()["steps"]) == 1
        assert words.gates[4] >= 1

    def test_pacer_that_ends_opens_every_gate(
        self, pacer_process: tuple[PacerLink, SharedWords, Wire]
    ) -> None:
        """A coordinator that goes away leaves no stream held, and the rank is told."""
        link, words, wire = pacer_process
        wire.connection.close()
        with pytest.raises(StuckError, match="coordinator ended"):
            link.hear()
        assert words.gates.min() > 0
