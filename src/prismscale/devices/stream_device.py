"""Recording on a device whose streams run behind the host's back.

The host only issues work; a stream does it later, in order. So nothing here waits for the device:
marks are events, a communication runs on a stream of its own, waiting for it is an order between
two streams, and times are read after the program stopped.

:class:`DeviceStreams` is the seam: ``torch.cuda`` answers it in :mod:`.cuda`, streams of logical
time in the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from prismscale.devices.lane_spans import LaneSpans
from prismscale.devices.protocol import CommunicationEnd, LaneObserver, SpanSink

Stream = Any
"""Hashable; equal for equal streams."""
Event = Any
"""A point in a stream."""

MAX_OPEN_MARKS = 4096
"""Marks whose events are still held: beyond it, those that were reached are turned into numbers."""
ANCHOR_NS = 500_000_000
"""CUDA reports elapsed time as 32-bit milliseconds: up to here that is exact to 60 ns."""


class DeviceStreams(Protocol):
    """Streams of one device and the events that order and time them."""

    def current(self) -> Stream:
        """The stream that work issued by this thread goes to."""
        ...

    def create(self) -> Stream:
        """A new stream."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Let work go to ``stream`` meanwhile."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that is reached once everything issued to ``stream`` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is issued to ``stream`` from now on starts after ``event``; the host goes on."""
        ...

    def reached(self, event: Event) -> bool:
        """Whether the device has reached ``event``; never blocks."""
        ...

    def synchronize(self, event: Event | None = None) -> None:
        """Block the host until ``event``, or all work of the device, is done."""
        ...

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """Device time between two events that were reached; negative in the other order."""
        ...


class StreamObserver(Protocol):
    """Told what the *program* does with streams; see :meth:`ObservableStreams.observed`."""

    def switched(self, before: Stream, after: Stream) -> None:
        """Work of the program goes to another stream from now on."""
        ...

    def recorded(self, event: object, stream: Stream) -> None:
        """The program records its event on ``stream``; called before."""
        ...

    def waits(self, stream: Stream, event: object, order: Callable[[], None]) -> None:
        """The program lets ``stream`` wait for its event; the observer calls ``order`` to do it."""
        ...


class ObservableStreams(DeviceStreams, Protocol):
    """Streams whose use by the program can be watched."""

    def observed(self, observer: StreamObserver) -> AbstractContextManager[None]:
        """Tell ``observer`` meanwhile; what is done through :class:`DeviceStreams` is not told."""
        ...


class StreamMark:
    """A point in device time: an event, until its time is read."""

    __slots__ = ("event", "ns")

    def __init__(self, event: Event) -> None:
        self.event: Event | None = event
        self.ns = 0


class EventTimes:
    """Device time of events, in nanoseconds since the first one that was asked for."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._anchor: Event | None = None
        self._anchor_ns = 0

    def ns(self, event: Event) -> int:
        """When ``event``, which was reached, was reached."""
        if self._anchor is None:
            self._anchor = event
            return 0
        ns = self._anchor_ns + self._streams.elapsed_ns(self._anchor, event)
        if ns - self._anchor_ns > ANCHOR_NS:
            self._anchor, self._anchor_ns = event, ns
        return ns


class Flight:
    """A communication that was issued to its stream.

    It holds what was issued, and with it the tensors, until somebody waits or the device is done:
    as NCCL's work objects do, so that no memory is given to others while a stream uses it.
    """

    def __init__(self, streams: DeviceStreams, ended: Event, issued: Callable[[Stream], None]):
        self._streams = streams
        self._issued: Callable[[Stream], None] | None = issued
        self.ended = ended

    @property
    def is_over(self) -> bool:
        """Whether it holds nothing that the device may still use."""
        if self._issued is not None and self._streams.reached(self.ended):
            self._issued = None
        return self._issued is None

    def join(self, blocks_host: bool = False) -> None:
        """Let the current stream wait for the end; with ``blocks_host`` the host too."""
        self._streams.wait(self._streams.current(), self.ended)
        if blocks_host:
            self._streams.synchronize(self.ended)
        self._issued = None


class CommunicationStreams:
    """One stream for each channel, ordered after the stream that communicates."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._by_channel: dict[object, Stream] = {}
        self._flights: deque[Flight] = deque()

    def issue(self, channel: object, work: Callable[[Stream], None]) -> Flight:
        """Let ``work`` issue to the channel's stream, after what the current stream has now."""
        streams = self._streams
        stream = self._by_channel.get(channel)
        if stream is None:
            stream = self._by_channel[channel] = streams.create()
        streams.wait(stream, streams.record(streams.current()))
        with streams.use(stream):
            work(stream)
        flight = Flight(streams, streams.record(stream), work)
        while self._flights and self._flights[0].is_over:
            self._flights.popleft()
        self._flights.append(flight)
        return flight


class StreamDevice:
    """A :class:`CaptureDevice` on streams. Its lanes are the streams the program computes on."""

    def __init__(self, streams: ObservableStreams, *, name: str) -> None:
        self.name = name
        self._streams = streams
        self._communication = CommunicationStreams(streams)
        self._lanes: dict[Stream, str] = {}
        self._by_lane: dict[str, Stream] = {}
        self._marks: deque[StreamMark] = deque()
        self._times = EventTimes(streams)

    def spans(self, stream: SpanSink, label: str) -> LaneSpans:
        """One span between two marks."""
        return LaneSpans(stream, self, label)

    def lane(self) -> str:
        """The current stream's lane."""
        return self._lane_of(self._streams.current())

    def mark(self, lane: str) -> StreamMark:
        """An event on the lane's stream."""
        mark = StreamMark(self._streams.record(self._by_lane[lane]))
        self._marks.append(mark)
        if len(self._marks) > MAX_OPEN_MARKS:
            self._flush_marks()
        return mark

    def elapsed_ns(self, began: StreamMark, ended: StreamMark) -> int:
        """Device time between them; the first call waits for all work of the device."""
        if self._marks:
            self._streams.synchronize()
            self._flush_marks()
        return ended.ns - began.ns

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Fill on the channel's stream; the result lets the then current stream wait for it."""
        flight = self._communication.issue(channel, lambda _: fill())
        return lambda: flight.join(blocks_host)

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Tell ``observer`` what the program does with its streams."""
        return self._streams.observed(_LaneTranslator(self._lane_of, observer))

    def _lane_of(self, stream: Stream) -> str:
        lane = self._lanes.get(stream)
        if lane is None:
            lane = self._lanes[stream] = f"stream {len(self._lanes)}"
            self._by_lane[lane] = stream
        return lane

    def _flush_marks(self) -> None:
        """Turn marks that were reached into numbers, oldest first, and let go of their events."""
        while self._marks and self._streams.reached(self._marks[0].event):
            mark = self._marks.popleft()
            mark.ns, mark.event = self._times.ns(mark.event), None


_COVERED = "_prismscale_covered"
"""Attribute of a program's event: what it covers."""


class _LaneTranslator:
    """Streams and events of the program in the recorder's words: lanes and what an event covers.

    What an event covers is kept on the event. A table with weak keys would be neater, but a weak
    reference to a ``torch.cuda.Event`` of torch 2.11 outlives it and crashes the process later.
    """

    def __init__(self, lane_of: Callable[[Stream], str], observer: LaneObserver) -> None:
        self._lane_of = lane_of
        self._observer = observer

    def switched(self, before: Stream, after: Stream) -> None:
        self._observer.lane_switched(self._lane_of(before), self._lane_of(after))

    def recorded(self, event: object, stream: Stream) -> None:
        setattr(event, _COVERED, self._observer.lane_frontier(self._lane_of(stream)))

    def waits(self, stream: Stream, event: object, order: Callable[[], None]) -> None:
        covered: tuple[int, ...] = getattr(event, _COVERED, ())
        self._observer.lane_waits(self._lane_of(stream), covered, order)
