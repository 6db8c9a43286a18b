"""A device of logical time: streams that do what they are given, in order, for as long as told.

It answers the same questions as ``torch.cuda`` does for the real one, so that recording and live
ranks are tested without a GPU. The host's clock stands still while the program issues work: any
nanosecond that passes is one that something blocked the host for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prismscale.devices.stream_device import StreamObserver
from prismscale.live.pacer.shared_words import Point, SharedWords

HOST_STEP_NS = 1000


@dataclass(eq=False)
class Event:
    """A point in a stream; ``at_ns`` once the device can tell."""

    at_ns: int | None = None


@dataclass(eq=False)
class Stream:
    """Work in order."""

    free_ns: int = 0
    todo: deque[tuple[int, Callable[[int], int | None]]] = field(default_factory=deque)
    """(issued at, what to do): from a start time to an end time, or None while it cannot go on."""


class LogicalStreams:
    """The device, and the program's way to use it."""

    def __init__(self, words: SharedWords | None = None) -> None:
        self.now_ns = 0
        self.home = Stream()
        self.streams = [self.home]
        self.while_host_waits: Callable[[], None] = lambda: None
        self._current = self.home
        self._words = words
        self._writes: list[tuple[int, Point]] = []
        self._opened_ns: dict[Point, int] = {}
        self._observer: StreamObserver | None = None

    # What prismscale asks

    def current(self) -> Stream:
        return self._current

    def create(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record(self, stream: Stream) -> Event:
        return self._record(Event(), stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._issue(stream, lambda start: None if event.at_ns is None else max(start, event.at_ns))

    def reached(self, event: Event) -> bool:
        return event.at_ns is not None and event.at_ns <= self.now_ns

    def synchronize(self, event: Event | None = None) -> None:
        while not (self.reached(event) if event else self._is_done()):
            self.advance_to(self.now_ns + HOST_STEP_NS)
            self.while_host_waits()

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        assert began.at_ns is not None
        assert ended.at_ns is not None
        return ended.at_ns - began.at_ns

    @contextmanager
    def observed(self, observer: StreamObserver) -> Iterator[None]:
        self._observer = observer
        yield
        self._observer = None

    def count(self, stream: Stream, point: Point) -> None:
        def write(start: int) -> int:
            self._writes.append((start, point))
            return start

        self._issue(stream, write)

    def hold(self, stream: Stream, gate: Point) -> None:
        words = self._words
        assert words is not None

        def pass_(start: int) -> int | None:
            if words.gates[gate.word] < gate.value:
                return None
            return max(start, self._opened_ns.setdefault(gate, self.now_ns))

        self._issue(stream, pass_)

    # What a program does

    def work(self, duration_ns: int) -> None:
        """A kernel on the current stream."""
        self._issue(self._current, lambda start: start + duration_ns)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Like ``torch.cuda.stream``."""
        before = self._current
        self._switch(stream)
        yield
        self._switch(before)

    def program_records(self, stream: Stream | None = None) -> Event:
        """Like ``Event.record``."""
        stream = stream or self._current
        event = Event()
        if self._observer:
            self._observer.recorded(event, stream)
        return self._record(event, stream)

    def program_waits(self, event: Event, stream: Stream | None = None) -> None:
        """Like ``Stream.wait_event``."""
        waiting = stream or self._current
        if self._observer:
            self._observer.waits(waiting, event, lambda: self.wait(waiting, event))
        else:
            self.wait(waiting, event)

    # The passing of time

    def host_computes(self, duration_ns: int) -> None:
        """The program's own Python takes time."""
        self.advance_to(self.now_ns + duration_ns)

    def advance_to(self, now_ns: int) -> None:
        """Let time pass: counters appear to the host, opened gates to the device."""
        self.now_ns = now_ns
        self._run()
        for at_ns, point in [w for w in self._writes if w[0] <= now_ns]:
            assert self._words is not None
            self._words.counters[point.word] = point.value
            self._writes.remove((at_ns, point))

    def _record(self, event: Event, stream: Stream) -> Event:
        def reach(start: int) -> int:
            event.at_ns = start
            return start

        self._issue(stream, reach)
        return event

    def _switch(self, stream: Stream) -> None:
        before, self._current = self._current, stream
        if self._observer:
            self._observer.switched(before, stream)

    def _issue(self, stream: Stream, do: Callable[[int], int | None]) -> None:
        stream.todo.append((self.now_ns, do))
        self._run()

    def _run(self) -> None:
        moved = True
        while moved:
            moved = any(self._run_one(stream) for stream in self.streams)

    def _run_one(self, stream: Stream) -> bool:
        if not stream.todo:
            return False
        issued, do = stream.todo[0]
        end = do(max(stream.free_ns, issued))
        if end is None:
            return False
        stream.todo.popleft()
        stream.free_ns = end
        return True

    def _is_done(self) -> bool:
        self._run()
        return all(not s.todo and s.free_ns <= self.now_ns for s in self.streams)
