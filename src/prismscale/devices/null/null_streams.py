"""``torch.cuda.Stream`` and ``torch.cuda.Event`` on the null device.

In a CPU-only torch these two classes have dummy base classes. Here they derive from
``torch.Stream`` and ``torch.Event``, which work on any device with a device guard, and keep CUDA's
own signatures.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CUDA_DEVICE_TYPE = 1  # c10::DeviceType::CUDA
_library: ctypes.PyDLL


def bind(library: ctypes.PyDLL) -> None:
    """Set the extension that these classes ask for times."""
    global _library
    _library = library


class Stream(torch.Stream):
    """A stream of the null device; ``cuda_stream`` is its id (0 is the default stream)."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            stream = super().__new__(cls, **kwargs)
        else:
            index = torch.cuda._utils._get_device_index(device, optional=True)
            stream = super().__new__(cls, device=torch.device("cuda", index), priority=priority)
        return stream

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    @property
    def priority(self) -> int:
        return -1 if self.stream_id > 32 else 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority, as CUDA returns them."""
        return (0, -5)

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)


class ExternalStream(Stream):
    """A stream of another library: here one of the null device's streams, given by its id."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> ExternalStream:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(  # type: ignore[return-value]
            cls, stream_id=stream_ptr, device_index=index, device_type=CUDA_DEVICE_TYPE
        )


class Event(torch.Event):
    """An event of the null device, with logical time."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return milliseconds of logical time.

        torch's own method refuses subclasses of torch.Event.
        """
        if not (self.event_id and end_event.event_id):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        elapsed_ns: int = _library.ps_elapsed_ns(self.event_id, end_event.event_id)
        return elapsed_ns / 1e6

    @property
    def cuda_event(self) -> int:
        return int(self.event_id)

    def ipc_handle(self) -> bytes:
        raise RuntimeError("CUDA events of the null device cannot be shared between processes")
