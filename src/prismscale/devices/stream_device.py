"""Recording on a device with asynchronous streams.

The host only issues work; a stream runs it later, in order. So nothing here waits for the device.
Marks are events. A communication runs on a stream of its own, and a wait for it is an order between
two streams. Times are read after the program has stopped.

:class:`DeviceStreams` is the interface to the device. :mod:`.cuda` implements it with
``torch.cuda``, the tests with streams of logical time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from prismscale.devices.lane_spans import LaneSpans
from prismscale.devices.protocol import CommunicationEnd, LaneObserver, SpanSink

Stream = Any
"""Device stream; hashable, and equal for equal streams."""
Event = Any
"""A point in a stream."""

MAX_OPEN_MARKS = 4096
"""Most marks that hold an event. Beyond it, marks that were reached are turned into numbers."""
ANCHOR_NS = 500_000_000
"""Longest time measured from one anchor. CUDA reports elapsed time as 32-bit floating-point
milliseconds, which are exact to 60 ns up to here."""


class DeviceStreams(Protocol):
    """Streams of one device and the events that order and time them."""

    def current(self) -> Stream:
        """Return the stream to which this thread's work goes."""
        ...

    def create(self) -> Stream:
        """Return a new stream."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Send work to ``stream`` during the block."""
        ...

    def record(self, stream: Stream) -> Event:
        """Return an event that is reached once all work issued to ``stream`` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of ``stream`` start after ``event``; the host does not wait."""
        ...

    def reached(self, event: Event) -> bool:
        """Return whether the device has reached ``event``; never blocks."""
        ...

    def synchronize(self, event: Event | None = None) -> None:
        """Block the host until ``event``, or all work of the device, is done."""
        ...

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """Return the device time between two reached events; negative in the other order."""
        ...


class StreamObserver(Protocol):
    """Receiver of what the *program* does with streams; see :meth:`ObservableStreams.observed`."""

    def switched(self, before: Stream, after: Stream) -> None:
        """Note that the program's work goes to another stream from now on."""
        ...

    def recorded(self, event: object, stream: Stream) -> None:
        """Note that the program is about to record its event on ``stream``."""
        ...

    def waits(self, stream: Stream, event: object, order: Callable[[], None]) -> None:
        """Note that the program makes ``stream`` wait for its event; call ``order`` to do it."""
        ...


class ObservableStreams(DeviceStreams, Protocol):
    """Streams whose use by the program can be observed."""

    def observed(self, observer: StreamObserver) -> AbstractContextManager[None]:
        """Tell ``observer`` during the block, but not of calls through :class:`DeviceStreams`."""
        ...


class StreamMark:
    """A point in device time: an event until its time is read, then a number."""

    __slots__ = ("event", "ns")

    def __init__(self, event: Event) -> None:
        self.event: Event | None = event
        self.ns = 0


class EventTimes:
    """Device times of events, in nanoseconds since the first event that was looked up."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._anchor: Event | None = None
        self._anchor_ns = 0

    def ns(self, event: Event) -> int:
        """Return the time of ``event``, which must have been reached."""
        if self._anchor is None:
            self._anchor = event
            return 0
        ns = self._anchor_ns + self._streams.elapsed_ns(self._anchor, event)
        if ns - self._anchor_ns > ANCHOR_NS:
            self._anchor, self._anchor_ns = event, ns
        return ns


class Flight:
    """A communication that was issued to its stream.

    Like NCCL's work objects, it holds the issued call, and with it the tensors, until the program
    waits for it or the device is done. So no memory is reused while a stream works on it.
    """

    def __init__(self, streams: DeviceStreams, ended: Event, issued: Callable[[Stream], None]):
        self._streams = streams
        self._issued: Callable[[Stream], None] | None = issued
        self.ended = ended

    @property
    def is_over(self) -> bool:
        """Whether the flight holds nothing that the device may still use."""
        if self._issued is not None and self._streams.reached(self.ended):
            self._issued = None
        return self._issued is None

    def join(self, blocks_host: bool = False) -> None:
        """Make the current stream wait for the end; with ``blocks_host`` the host too."""
        self._streams.wait(self._streams.current(), self.ended)
        if blocks_host:
            self._streams.synchronize(self.ended)
        self._issued = None


class CommunicationStreams:
    """Communication streams, one for each channel, ordered after the stream that communicates."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._by_channel: dict[object, Stream] = {}
        self._flights: deque[Flight] = deque()

    def issue(self, channel: object, work: Callable[[Stream], None]) -> Flight:
        """Issue ``work`` to the channel's stream, after the current stream's work so far."""
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
    """A :class:`CaptureDevice` with streams. Its lanes are the program's compute streams."""

    def __init__(self, streams: ObservableStreams, *, name: str) -> None:
        self.name = name
        self._streams = streams
        self._communication = CommunicationStreams(streams)
        self._lanes: dict[Stream, str] = {}
        self._by_lane: dict[str, Stream] = {}
        self._marks: deque[StreamMark] = deque()
        self._times = EventTimes(streams)

    def spans(self, stream: SpanSink, label: str) -> LaneSpans:
        """Return spans that lie between two marks each."""
        return LaneSpans(stream, self, label)

    def lane(self) -> str:
        """Return the current stream's lane."""
        return self._lane_of(self._streams.current())

    def mark(self, lane: str) -> StreamMark:
        """Record an event on the lane's stream."""
        mark = StreamMark(self._streams.record(self._by_lane[lane]))
        self._marks.append(mark)
        if len(self._marks) > MAX_OPEN_MARKS:
            self._flush_marks()
        return mark

    def elapsed_ns(self, began: StreamMark, ended: StreamMark) -> int:
        """Return the device time between two marks; the first call waits for the whole device."""
        if self._marks:
            self._streams.synchronize()
            self._flush_marks()
        return ended.ns - began.ns

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Run ``fill`` on the channel's stream.

        The returned call makes the stream that is then current wait for it.
        """
        flight = self._communication.issue(channel, lambda _: fill())
        return lambda: flight.join(blocks_host)

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Tell ``observer``, during the block, what the program does with its streams."""
        return self._streams.observed(_LaneTranslator(self._lane_of, observer))

    def _lane_of(self, stream: Stream) -> str:
        lane = self._lanes.get(stream)
        if lane is None:
            lane = self._lanes[stream] = f"stream {len(self._lanes)}"
            self._by_lane[lane] = stream
        return lane

    def _flush_marks(self) -> None:
        """Turn marks that were reached into numbers, oldest first, and release their events."""
        while self._marks and self._streams.reached(self._marks[0].event):
            mark = self._marks.popleft()
            mark.ns, mark.event = self._times.ns(mark.event), None


_COVERED = "_prismscale_covered"
"""Attribute of a program's event: the frontier that is done when the event is reached."""


class _LaneTranslator:
    """Translator of the program's streams and events to lanes and frontiers for the recorder.

    An event's frontier is stored on the event. A table with weak keys would be neater, but a weak
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
