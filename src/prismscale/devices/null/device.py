"""The null device as the recorder sees it: both its time and its memory are modelled."""

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
    """A :class:`~prismscale.devices.protocol.CaptureDevice` whose marks are nanoseconds."""

    name = "null"

    def __init__(self, runtime: NullRuntime) -> None:
        self._library = runtime.library
        self._spans: NullSpans | None = None

    def spans(self, stream: SpanSink, label: str) -> NullSpans:
        """Begin the spans that the extension condenses; they are written to ``stream``."""
        self._spans = NullSpans(self._library, stream, label)
        return self._spans

    def n_nodes(self) -> int:
        """Return the number of nodes so far, without the spans that are still open."""
        return 0 if self._spans is None else self._spans.n_nodes()

    def elapsed_ns(self, began: int, ended: int) -> int:
        """Return the nanoseconds between two marks."""
        return ended - began

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Run ``fill`` at once.

        The returned call holds ``fill``, and with it the tensors of the communication, until it is
        called at the wait. NCCL's work objects hold their tensors in the same way, so the allocator
        does not reuse their memory before.
        """
        fill()
        held = [fill]
        return held.clear

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Do nothing: the extension itself sees what the program does with its streams."""
        return nullcontext()


class ModelledMemoryTracker:
    """Tracks the peaks of the allocator model on the program's device.

    They are counted apart from the peaks that ``torch.cuda`` reports, because a program may reset
    those.
    """

    def __init__(self, runtime: NullRuntime, outside: OutsideMemory) -> None:
        self._library = runtime.library
        self._outside = outside
        self.history = runtime.history
        self._peaks: list[tuple[int, int]] = []

    def start(self) -> None:
        """Begin to track peaks, from what is allocated now."""
        self._take()
        self.history.start()

    def optimizer_begins(self) -> None:
        """Note what the blocks hold while the gradients still exist."""
        self.history.look()

    def step_ended(self) -> None:
        """Note the peaks of the step that ended."""
        self._peaks.append(self._take())
        self.history.step_ended()

    def repeats(self, calls: int) -> bool:
        """Return whether the last step has had the same peaks as the one before it.

        A step has ``calls`` optimizer calls. The peaks are of allocated and of reserved bytes, and
        the last step must be at least the third one.
        """
        last, before = self._peaks[-calls:], self._peaks[-2 * calls : -calls]
        return len(self._peaks) >= 3 * calls and last == before

    def stop(self) -> MemoryRecord:
        """Return the peaks of all steps, and end the tracking."""
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
