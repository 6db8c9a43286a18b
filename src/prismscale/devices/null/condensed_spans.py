"""A program's computation on the null device: a host lane, and a lane for each stream.

The extension condenses what it sees (``csrc/spans.h``): the program's streams, events and waits for
the device, whoever asks for them, autograd's C++ included. Here its nodes come into the same stream
as the recorder's communications, and the two count positions together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from prismscale.devices.null.bindings import SPAN_ROW
from prismscale.devices.protocol import Mark, SpanSink
from prismscale.emulation.hook import Captures
from prismscale.graph.trace import HOST

LAUNCH = "host"
"""Suffix of what waits for the host: a launch path's share beyond the work is launch-bound time."""
NOT_HELD = "optimizer"
"""Label of the phase in which full launch queues do not hold the host: see ``csrc/spans.h``."""
_WIDEST = 64


class NullLane:
    """Where the current stream, and the host with it, are."""

    def __init__(self, spans: NullSpans) -> None:
        self._spans = spans

    def issues(self, by_host: bool) -> tuple[int, ...]:
        """The host's frontier, and the current stream's unless the device has no part in it."""
        return self._spans.issue(by_host)

    def joins(self, nodes: Sequence[int], by_host: bool) -> None:
        """The current stream, or with ``by_host`` the host, goes on after ``nodes``."""
        self._spans.join(nodes, by_host)


class NullSpans:
    """Writes what the extension condensed to a node stream, before anything else is written."""

    def __init__(self, library: ctypes.PyDLL, stream: SpanSink, label: str) -> None:
        self._library = library
        self._stream = stream
        self._lane = NullLane(self)
        self._written = 0
        self._latest: dict[int, int] = {}
        """Latest batch of each lane of communications."""
        self._lanes = [stream.lanes.id(HOST)]
        library.ps_spans_begin()
        self.label = label

    @property
    def label(self) -> str:
        """What spans are called from now on."""
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
        """What this thread does meanwhile costs nothing; ``ended`` is of no use here."""
        self._library.ps_without_cost(1)
        try:
            yield self._lane
        finally:
            self._tell_positions()
            self._library.ps_without_cost(0)

    def n_nodes(self) -> int:
        """Nodes of the stream so far, with those that the extension has closed by now."""
        self._drain()
        return len(self._stream.nodes)

    def issue(self, by_host: bool) -> tuple[int, ...]:
        """Cut; the predecessors of what the caller appends next."""
        device, stream = self._current()
        preds = (ctypes.c_int32 * _WIDEST)()
        count = self._library.ps_spans_issued(device, stream, by_host, preds, _WIDEST)
        self._drain()
        return tuple(preds[:count])

    def join(self, nodes: Sequence[int], by_host: bool) -> None:
        """The current stream or the host waits for ``nodes``."""
        self._tell_positions()
        device, stream = self._current()
        array = (ctypes.c_int32 * len(nodes))(*nodes)
        self._library.ps_spans_joined(device, stream, array, len(nodes), by_host)

    def switch(self, before: str, after: str) -> None:
        """The extension sees by itself where work goes."""

    def restart(self) -> None:
        """Only ops take time here, and what ran since was none of them."""

    def close(self) -> None:
        """Close the spans of all lanes."""
        self._library.ps_spans_close()
        self._drain()

    def _current(self) -> tuple[int, int]:
        device = self._library.ps_current_device()
        return device, self._library.ps_current_stream(device)

    def _tell_positions(self) -> None:
        """Count the batch of communications that was appended since the extension's last node."""
        first, stop = self._written, len(self._stream.nodes)
        if first == stop:
            return
        node = self._stream.nodes[first]
        before = self._latest.get(node.lane, -1)
        # gloo runs batches of one lane side by side: they follow nobody.
        in_order = before < 0 or before in node.preds
        self._latest[node.lane] = first
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
