"""Spans of a program's computation on the null device: a host lane, and a lane for each stream.

The extension sees every launch, event and wait for the device, also those that autograd's C++ code
makes, and condenses them to nodes (``csrc/spans.h``). This module appends these nodes to the same
node stream as the recorder's communications. Both share one count of positions.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from prismscale.devices.null.bindings import SPAN_ROW
from prismscale.devices.protocol import Mark, SpanSink
from prismscale.emulation.hook import Captures
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST

LAUNCH = "host"
"""Suffix of the label of launch paths and host work. The time by which a launch path exceeds the
work of its stream is launch-bound."""
NOT_HELD = "optimizer"
"""Label of the phase in which full launch queues do not block the host: see ``csrc/spans.h``."""
_USUAL_WIDTH = 64
"""Predecessors of one communication for which there is room at first."""


class NullLane:
    """The current stream and the host, at a cut between two spans."""

    def __init__(self, spans: NullSpans) -> None:
        self._spans = spans

    def issues(self, by_host: bool) -> tuple[int, ...]:
        """Return the host's frontier and, without ``by_host``, also the current stream's."""
        return self._spans.issue(by_host)

    def joins(self, nodes: Sequence[int], by_host: bool) -> None:
        """Make the current stream, or with ``by_host`` the host, wait for ``nodes``."""
        self._spans.join(nodes, by_host)


class NullSpans:
    """Writer of the extension's condensed nodes into a node stream.

    It writes all nodes that the extension has closed before the recorder appends a communication.
    """

    def __init__(self, library: ctypes.PyDLL, stream: SpanSink, label: str) -> None:
        self._library = library
        self._stream = stream
        self._lane = NullLane(self)
        self._written = 0
        self._latest: dict[int, int] = {}
        """Position of the latest batch of communications on each lane."""
        self._lanes = [stream.lanes.id(HOST)]
        self._issued_at: list[int] = []
        """Positions at which batches of communications begin, ascending."""
        self._issued_ns: list[int] = []
        """What each of these batches follows: its stream's logical time as it was issued, or what
        communications follow that it comes behind."""
        library.ps_spans_begin()
        self.label = label

    @property
    def label(self) -> str:
        """Label of all later spans. Setting it ends the open span of every lane."""
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = label
        names = self._stream.labels
        launch = names.id(f"{label}, {LAUNCH}")
        self._library.ps_spans_label(names.id(label), launch, label != NOT_HELD)
        self._drain()
        if Captures.under_way is not None:
            Captures.under_way.later(partial(setattr, self, "label", label))

    @contextmanager
    def paused(self, name: str | None = None, ended: Mark = None) -> Iterator[NullLane]:
        """Count no cost for what this thread does within the block; ``ended`` is not used."""
        self._library.ps_without_cost(1)
        try:
            yield self._lane
        finally:
            self._tell_positions()
            self._library.ps_without_cost(0)

    def n_nodes(self) -> int:
        """Return the number of nodes of the stream, with all that the extension has closed."""
        self._drain()
        return len(self._stream.nodes)

    def issue(self, by_host: bool) -> tuple[int, ...]:
        """Cut the host, and without ``by_host`` the current stream; see :meth:`NullLane.issues`."""
        device, stream = self._current()
        preds = (ctypes.c_int32 * _USUAL_WIDTH)()
        count = self._library.ps_spans_issued(device, stream, by_host, preds, len(preds))
        if count > len(preds):
            # Nothing happens in between: the second call finds the same.
            preds = (ctypes.c_int32 * count)()
            self._library.ps_spans_issued(device, stream, by_host, preds, count)
        self._drain()
        self._issued_at.append(len(self._stream.nodes))
        self._issued_ns.append(self._library.ps_stream_time_ns(device, stream))
        return tuple(preds[:count])

    def join(self, nodes: Sequence[int], by_host: bool) -> None:
        """Make the current stream, or with ``by_host`` the host, wait for ``nodes``."""
        self._tell_positions()
        device, stream = self._current()
        if not by_host:
            # A communication takes no logical time here. What waits for it is due no earlier than
            # what it follows, or kernels of other streams would seem to be in the way.
            self._library.ps_advance_stream(device, stream, self._followed_ns(nodes))
        array = (ctypes.c_int32 * len(nodes))(*nodes)
        self._library.ps_spans_joined(device, stream, array, len(nodes), by_host)

    def communicates(self) -> None:
        """Let the host issue a communication to the current stream: see ``ps_communicates``."""
        self._library.ps_communicates(*self._current())

    def switch(self, before: str, after: str) -> None:
        """Do nothing: the extension itself sees to which stream work goes."""

    def restart(self) -> None:
        """Do nothing: only ops take time here, and what ran since the span began was no op."""

    def close(self) -> None:
        """Close the spans of all lanes."""
        self._library.ps_spans_close()
        self._drain()

    def _followed_ns(self, nodes: Sequence[int]) -> int:
        """Return the latest logical time that any of the communications follows."""
        batches = {bisect_right(self._issued_at, node) - 1 for node in nodes}
        return max((self._issued_ns[batch] for batch in batches if batch >= 0), default=0)

    def _current(self) -> tuple[int, int]:
        device = self._library.ps_current_device()
        return device, self._library.ps_current_stream(device)

    def _tell_positions(self) -> None:
        """Tell the extension of the batch of communications appended since its own last node."""
        first, stop = self._written, len(self._stream.nodes)
        if first == stop:
            return
        node = self._stream.nodes[first]
        before = self._latest.get(node.lane, -1)
        # gloo runs batches of one lane side by side, so they do not follow the lane's last batch.
        in_order = before < 0 or before in node.preds
        self._latest[node.lane] = first
        if self._issued_at and self._issued_at[-1] == first:
            behind = [p for p in node.preds if self._stream.nodes[p].kind != NodeKind.COMPUTE]
            self._issued_ns[-1] = max(self._issued_ns[-1], self._followed_ns(behind))
        preds = (ctypes.c_int32 * len(node.preds))(*node.preds)
        self._library.ps_spans_took(
            stop - first, node.lane if in_order else -1, preds, len(node.preds)
        )
        self._written = stop

    def _drain(self) -> None:
        self._tell_positions()
        n_rows, n_preds = ctypes.c_int64(), ctypes.c_int64()
        self._library.ps_spans_pending(ctypes.byref(n_rows), ctypes.byref(n_preds))
        if not n_rows.value:
            return
        rows = np.empty(n_rows.value, dtype=SPAN_ROW)
        preds = np.empty(n_preds.value, dtype=np.int32)
        self._library.ps_spans_drain(rows.ctypes.data, preds.ctypes.data)
        all_preds = preds.tolist()
        for duration_ns, first, count, label, lane in rows.tolist():
            self._stream.add_computation(
                preds=tuple(all_preds[first : first + count]),
                lane=self._lane_id(lane),
                label=label,
                began=0,
                ended=duration_ns,
            )
        self._written += len(rows)

    def _lane_id(self, lane: int) -> int:
        while lane >= len(self._lanes):
            self._lanes.append(self._stream.lanes.id(f"stream {len(self._lanes) - 1}"))
        return self._lanes[lane]
