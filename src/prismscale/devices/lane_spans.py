"""Computation between two places where lanes meet: one COMPUTE node for each such span.

A lane is a host thread or a device stream. *Home*, the lane on which the program starts, always has
an open span: where it waits for the host, the host's time is part of the step. Any other lane has
one only while the program computes on it: a copy stream that nobody uses for half a step is idle,
not busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prismscale.devices.protocol import Mark, MarkingDevice, SpanSink


@dataclass(slots=True)
class Lane:
    """Where one lane is. Numbers are positions in the node stream."""

    name: str
    id: int
    began: Mark = None
    """Of the open span; None while there is none."""
    last: int = -1
    joined: list[int] = field(default_factory=list)
    """What the lane has waited for since its last span."""

    @property
    def frontier(self) -> tuple[int, ...]:
        """Nodes that must be done for the lane to have done all it was given."""
        own = (self.last,) if self.last >= 0 else ()
        return tuple(dict.fromkeys((*own, *self.joined))) if self.joined else own

    def issues(self, by_host: bool) -> tuple[int, ...]:
        """What is issued comes after all that the lane was given."""
        return self.frontier

    def joins(self, nodes: Sequence[int], by_host: bool) -> None:
        """The next span comes after ``nodes``; where the host waits is in the lane's own time."""
        self.joined.extend(nodes)


class LaneSpans:
    """The spans of every lane, written to a node stream as they close."""

    def __init__(self, stream: SpanSink, device: MarkingDevice, label: str) -> None:
        self.label = label
        """What spans are called from now on."""
        self._stream = stream
        self._device = device
        self._lanes: dict[str, Lane] = {}
        self._home = self._lane(device.lane())
        self._open(self._home)

    def close(self) -> None:
        """Close the span of the current lane."""
        self._close(self._lane(self._device.lane()))

    def restart(self) -> None:
        """What the current lane did since its span began was not the program's work."""
        lane = self._lane(self._device.lane())
        if lane.began is not None:
            self._open(lane)

    @contextmanager
    def paused(self, name: str | None = None, ended: Mark = None) -> Iterator[Lane]:
        """Close the span of a lane (None: the current one) meanwhile, at a mark (None: now)."""
        lane = self._lane(self._device.lane() if name is None else name)
        was_open = lane.began is not None
        self._close(lane, ended)
        yield lane
        if was_open:
            self._open(lane)

    def switch(self, before: str, after: str) -> None:
        """The program goes from one lane to another."""
        left, entered = self._lane(before), self._lane(after)
        if left is entered:
            return
        if left is not self._home:
            self._close(left)
        if entered.began is None:
            self._open(entered)

    def _lane(self, name: str) -> Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, self._stream.lanes.id(name))
        return lane

    def _open(self, lane: Lane) -> None:
        lane.began = self._device.mark(lane.name)

    def _close(self, lane: Lane, ended: Mark = None) -> None:
        if lane.began is None:
            return
        ended = self._device.mark(lane.name) if ended is None else ended
        lane.last = self._stream.add_computation(
            preds=lane.frontier,
            lane=lane.id,
            label=self._stream.labels.id(self.label),
            began=lane.began,
            ended=ended,
        )
        lane.began = None
        lane.joined.clear()
