"""Spans of computation between two points where lanes meet: one COMPUTE node for each span.

A lane is a host thread or a device stream. The lane on which the program starts, called *home*,
always has an open span: where home waits for the host, the host's time is part of the step. Any
other lane has an open span only while the program computes on it. A copy stream that is not used
for half a step is idle, not busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prismscale.devices.protocol import Mark, MarkingDevice, SpanSink


@dataclass(slots=True)
class Lane:
    """State of one lane. Nodes are given by their positions in the node stream."""

    name: str
    id: int
    began: Mark = None
    """Mark at which the open span began; None while there is no open span."""
    last: int = -1
    """The lane's last span; -1: none."""
    joined: list[int] = field(default_factory=list)
    """Nodes for which the lane has waited since its last span."""

    @property
    def frontier(self) -> tuple[int, ...]:
        """Nodes that are done once the lane has done all work that it was given."""
        own = (self.last,) if self.last >= 0 else ()
        return tuple(dict.fromkeys((*own, *self.joined))) if self.joined else own

    def issues(self, by_host: bool) -> tuple[int, ...]:
        """Return the frontier: what is issued comes after all work that the lane was given."""
        return self.frontier

    def joins(self, nodes: Sequence[int], by_host: bool) -> None:
        """Order the next span after ``nodes``; the lane's own time already has the host's waits."""
        self.joined.extend(nodes)


class LaneSpans:
    """The spans of every lane, which are written to a node stream as they close."""

    def __init__(self, stream: SpanSink, device: MarkingDevice, label: str) -> None:
        self.label = label
        """Label of all spans that close from now on."""
        self._stream = stream
        self._device = device
        self._lanes: dict[str, Lane] = {}
        self._home = self._lane(device.lane())
        self._open(self._home)

    def close(self) -> None:
        """Close the span of the current lane."""
        self._close(self._lane(self._device.lane()))

    def restart(self) -> None:
        """Restart the current lane's span: the time since it began was not the program's work."""
        lane = self._lane(self._device.lane())
        if lane.began is not None:
            self._open(lane)

    @contextmanager
    def paused(self, name: str | None = None, ended: Mark = None) -> Iterator[Lane]:
        """Close the span of a lane (None: the current one) for the block, at a mark (None: now)."""
        lane = self._lane(self._device.lane() if name is None else name)
        was_open = lane.began is not None
        self._close(lane, ended)
        yield lane
        if was_open:
            self._open(lane)

    def communicates(self) -> None:
        """Do nothing: spans are measured, and what issuing takes is part of them."""

    def switch(self, before: str, after: str) -> None:
        """Note that the program goes from one lane to another."""
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
