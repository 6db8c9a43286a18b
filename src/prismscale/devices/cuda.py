"""An NVIDIA GPU as device: spans from CUDA events, memory as ``torch.cuda`` reports it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from prismscale.devices.stream_device import Event, Stream, StreamObserver
from prismscale.errors import UsageError
from prismscale.graph.trace import MemoryRecord

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = "32"


def start_cuda() -> None:
    """Create the CUDA context of this process.

    ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron demands, puts all streams into one hardware
    queue. NCCL's kernels run past such a queue, but a stream that is held would stop it. So the
    context is created before the program starts, with the largest number of queues. The program
    still reads the value that it wants to see.

    Raises:
        UsageError: there is no GPU that this torch can use.
    """
    require_cuda()
    wanted = os.environ.get(CONNECTIONS)
    os.environ[CONNECTIONS] = MOST_CONNECTIONS
    try:
        torch.cuda.init()
        torch.cuda.synchronize()
    finally:
        if wanted is None:
            del os.environ[CONNECTIONS]
        else:
            os.environ[CONNECTIONS] = wanted


def require_cuda() -> None:
    """Raise if this machine has no usable GPU.

    Raises:
        UsageError: torch or the GPU is missing; the message says which.
    """
    if torch.version.cuda is None:
        raise UsageError(
            f"--device cuda needs a CUDA build of torch; this is torch {torch.__version__}. "
            "Install one on a machine with an NVIDIA GPU, or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise UsageError(
            "--device cuda needs an NVIDIA GPU, and torch finds none here (nvidia-smi and "
            "CUDA_VISIBLE_DEVICES may say why); use --device cpu"
        )


class CudaStreams:
    """Streams of ``torch.cuda``.

    They call the methods that ``torch.cuda`` had at construction, so that an observer of the
    program's calls does not see theirs.
    """

    def __init__(self) -> None:
        self._record: Callable[..., None] = torch.cuda.Event.record
        self._wait: Callable[..., None] = torch.cuda.Event.wait
        self._set_stream: Callable[..., None] = torch.cuda.set_stream

    def current(self) -> Stream:
        """Return the current stream of this thread."""
        return torch.cuda.current_stream()

    def create(self) -> Stream:
        """Return a stream of torch's pool, from which NCCL's streams come too."""
        return torch.cuda.Stream()

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Issue work to ``stream`` during the block."""
        before = torch.cuda.current_stream()
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(before)

    def record(self, stream: Stream) -> Event:
        """Record an event with timing on ``stream``."""
        event = torch.cuda.Event(enable_timing=True)
        self._record(event, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Make ``stream`` wait for ``event`` (``cudaStreamWaitEvent``)."""
        self._wait(event, stream)

    def reached(self, event: Event) -> bool:
        """Return whether ``event`` was reached (``cudaEventQuery``)."""
        return bool(event.query())

    def synchronize(self, event: Event | None = None) -> None:
        """Block this thread until ``event``, or the whole device, is done; others run on."""
        if event is None:
            torch.cuda.synchronize()
        else:
            event.synchronize()

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """Return the time between two events, exact to about 0.5 µs (``cudaEventElapsedTime``)."""
        return round(began.elapsed_time(ended) * 1e6)

    @contextmanager
    def observed(self, observer: StreamObserver) -> Iterator[None]:
        """Tell ``observer``, during the block, what the program does with streams.

        This rebinds ``Event.record``, ``Event.wait`` and ``set_stream``, on which all stream
        methods of ``torch.cuda`` are built. It does not see the edges between streams that torch
        makes in C++ (autograd).
        """

        def record(event: torch.cuda.Event, stream: Any = None) -> None:
            on = torch.cuda.current_stream() if stream is None else stream
            observer.recorded(event, on)
            self._record(event, on)

        def wait(event: torch.cuda.Event, stream: Any = None) -> None:
            waiting = torch.cuda.current_stream() if stream is None else stream
            observer.waits(waiting, event, lambda: self._wait(event, waiting))

        def set_stream(stream: Any) -> None:
            if stream is not None:
                before = torch.cuda.current_stream()
                self._set_stream(stream)
                observer.switched(before, stream)

        with ExitStack() as undo:
            for owner, name, replacement in (
                (torch.cuda.Event, "record", record),
                (torch.cuda.Event, "wait", wait),
                (torch.cuda, "set_stream", set_stream),
            ):
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            yield


class CudaMemoryTracker:
    """Tracker of the caching allocator's own peaks.

    With ``per_step`` the peaks are reset after each step, so that steps have peaks of their own;
    the program could see that. Without it the program's own memory figures are not changed.
    """

    def __init__(self, *, per_step: bool) -> None:
        self._per_step = per_step
        self._peaks: list[int] = []
        self._reserved = 0

    def start(self) -> None:
        """Begin with what is allocated now."""
        if self._per_step:
            torch.cuda.reset_peak_memory_stats()

    def optimizer_begins(self) -> None:
        """Do nothing."""

    def step_ended(self) -> None:
        """Read the peaks; the program may have reset them itself."""
        self._peaks.append(int(torch.cuda.max_memory_allocated()))
        self._reserved = max(self._reserved, int(torch.cuda.max_memory_reserved()))
        if self._per_step:
            torch.cuda.reset_peak_memory_stats()

    def stop(self) -> MemoryRecord:
        """Read the last peaks and return the record."""
        self.step_ended()
        return MemoryRecord(
            peak_bytes=max(self._peaks),
            peak_step=self._peaks.index(max(self._peaks)),
            step_peak_bytes=tuple(self._peaks) if self._per_step else (),
            reserved_bytes=self._reserved,
        )
