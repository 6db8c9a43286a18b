"""The null device as a place to record on: its time is modelled, its memory too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from prismscale.devices.null.condensed_spans import NullSpans
from prismscale.devices.null.memory.outside_memory import OutsideMemory
from prismscale.devices.null.runtime import NullRuntime
from prismscale.devices.protocol import CommunicationEnd, LaneObserver, SpanSink
from prismscale.graph.trace import MemoryRecord


class NullDevice:
    """A :class:`~prismscale.devices.protocol.CaptureDevice` whose marks are durations."""

    name = "null"

    def __init__(self, runtime: NullRuntime) -> None:
        self._library = runtime.library
        self._spans: NullSpans | None = None

    def spans(self, stream: SpanSink, label: str) -> NullSpans:
        """What the extension condenses from now on."""
        self._spans = NullSpans(self._library, stream, label)
        return self._spans

    def n_nodes(self) -> int:
        """Nodes of the program so far; spans that are open are none yet."""
        return 0 if self._spans is None else self._spans.n_nodes()

    def elapsed_ns(self, began: int, ended: int) -> int:
        """Their difference."""
        return ended - began

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Fill at once. The result holds what was issued, and with it the tensors, until somebody
        waits: as NCCL's work objects do, so that their memory is not given to others before."""
        fill()
        held = [fill]
        return held.clear

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """The extension sees what the program does with its streams."""
        return nullcontext()


class ModelledMemoryTracker:
    """Peaks of the allocator model on the program's device, apart from those that ``torch.cuda``
    shows: a program may reset those, and never sees these."""

    def __init__(self, runtime: NullRuntime, outside: OutsideMemory) -> None:
        self._library = runtime.library
        self._outside = outside
        self.history = runtime.history
        self._peaks: list[tuple[int, int]] = []

    def start(self) -> None:
        """Begin with what is allocated now."""
        self._take()
        self.history.start()

    def optimizer_begins(self) -> None:
        """Look at gradients before they are gone."""
        self.history.look()

    def step_ended(self) -> None:
        """Note the peaks since the last step."""
        self._peaks.append(self._take())
        self.history.step_ended()

    def repeats(self, calls: int) -> bool:
        """Whether a step of ``calls`` optimizer calls, the third one or later, has had the peaks of
        the one before it, and the allocator has asked for no more."""
        last, before = self._peaks[-calls:], self._peaks[-2 * calls : -calls]
        return len(self._peaks) >= 3 * calls and last == before

    def stop(self) -> MemoryRecord:
        """The peaks of all steps."""
        self.step_ended()
        self.history.stop()
        allocated = tuple(peak for peak, _ in self._peaks)
        return MemoryRecord(
            peak_bytes=max(allocated),
            peak_step=allocated.index(max(allocated)),
            step_peak_bytes=allocated,
            reserved_bytes=max(reserved for _, reserved in self._peaks),
            outside=self._outside.parts(),
            source="modelled",
        )

    def _take(self) -> tuple[int, int]:
        allocated, reserved = ctypes.c_int64(), ctypes.c_int64()
        self._library.ps_take_peaks(
            self._library.ps_current_device(), ctypes.byref(allocated), ctypes.byref(reserved)
        )
        return allocated.value, reserved.value
