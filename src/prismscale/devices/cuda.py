"""One NVIDIA GPU as the device: spans by CUDA events, memory as ``torch.cuda`` reports it."""

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
    queue. NCCL's kernels run past such a queue, a held stream would stop it: so the context is
    made with the most queues before the program, which still reads the value it wants to see.

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
    """Refuse a machine without a usable GPU.

    Raises:
        UsageError: says what is missing.
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
    """``torch.cuda``'s streams, without its Python methods once a program's use of those is
    observed."""

    def __init__(self) -> None:
        self._record: Callable[..., None] = torch.cuda.Event.record
        self._wait: Callable[..., None] = torch.cuda.Event.wait
        self._set_stream: Callable[..., None] = torch.cuda.set_stream

    def current(self) -> Stream:
        """The stream of this thread."""
        return torch.cuda.current_stream()

    def create(self) -> Stream:
        """A stream of torch's pool, as NCCL's are."""
        return torch.cuda.Stream()

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Issue to ``stream`` meanwhile."""
        before = torch.cuda.current_stream()
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(before)

    def record(self, stream: Stream) -> Event:
        """A timed event."""
        event = torch.cuda.Event(enable_timing=True)
        self._record(event, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """``cudaStreamWaitEvent``."""
        self._wait(event, stream)

    def reached(self, event: Event) -> bool:
        """``cudaEventQuery``."""
        return bool(event.query())

    def synchronize(self, event: Event | None = None) -> None:
        """Block the host; other threads run on."""
        if event is None:
            torch.cuda.synchronize()
        else:
            event.synchronize()

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """``cudaEventElapsedTime``: exact to about half a microsecond."""
        return round(began.elapsed_time(ended) * 1e6)

    @contextmanager
    def observed(self, observer: StreamObserver) -> Iterator[None]:
        """Rebind what every stream method of ``torch.cuda`` comes down to: ``Event.record``,
        ``Event.wait`` and ``set_stream``. Edges that torch draws in C++ (autograd between streams)
        are not seen."""

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
    """The caching allocator's own peaks.

    ``per_step`` tells steps apart by resetting the peaks after each, which the program could see;
    without it the program's own memory figures stay what they are.
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
        """Nothing to look at."""

    def step_ended(self) -> None:
        """Read the peaks; a program may have reset them itself."""
        self._peaks.append(int(torch.cuda.max_memory_allocated()))
        self._reserved = max(self._reserved, int(torch.cuda.max_memory_reserved()))
        if self._per_step:
            torch.cuda.reset_peak_memory_stats()

    def stop(self) -> MemoryRecord:
        """The last peaks."""
        self.step_ended()
        return MemoryRecord(
            peak_bytes=max(self._peaks),
            peak_step=self._peaks.index(max(self._peaks)),
            step_peak_bytes=tuple(self._peaks) if self._per_step else (),
            reserved_bytes=self._reserved,
        )
