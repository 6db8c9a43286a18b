"""``torch.cuda`` as the device, without a GPU: what is called, told, refused and counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.captured_rank import capture_rank
from prismscale.devices import cuda
from prismscale.devices.cuda import CudaMemoryTracker, CudaStreams, require_cuda
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import UsageError
from support.logical_streams import Event, LogicalStreams, Stream


class FakeEvent:
    """Has the methods of ``torch.cuda.Event`` that matter, on logical streams."""

    device: LogicalStreams

    def __init__(self, enable_timing: bool = False) -> None:
        self.inner = Event()

    def record(self, stream: Any = None) -> None:
        self.device._record(self.inner, stream)

    def wait(self, stream: Any = None) -> None:
        self.device.wait(stream, self.inner)

    def elapsed_time(self, other: FakeEvent) -> float:
        return self.device.elapsed_ns(self.inner, other.inner) / 1e6


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> LogicalStreams:
    """``torch.cuda`` with logical streams behind its own names."""
    device = LogicalStreams()
    monkeypatch.setattr(FakeEvent, "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    monkeypatch.setattr(torch.cuda, "set_stream", device._switch)
    return device


class Notes:
    """Keeps what it is told about streams."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def switched(self, before: Stream, after: Stream) -> None:
        self.told.append("switched")

    def recorded(self, event: object, stream: Stream) -> None:
        self.told.append("recorded")

    def waits(self, stream: Stream, event: object, order: Callable[[], None]) -> None:
        self.told.append("waits")
        order()


class TestCuda:
    def test_program_is_observed_and_we_are_not(self, fake_cuda: LogicalStreams) -> None:
        """The rebound methods tell of the program's calls only, and are put back."""
        streams, notes, side = CudaStreams(), Notes(), fake_cuda.create()
        with streams.observed(notes):
            with streams.use(side):
                streams.wait(fake_cuda.home, streams.record(side))
            event = torch.cuda.Event()
            event.record(side)
            event.wait(fake_cuda.home)
            torch.cuda.set_stream(side)
        event.record(side)
        assert notes.told == ["recorded", "waits", "switched"]

    def test_elapsed_time_is_in_nanoseconds(self, fake_cuda: LogicalStreams) -> None:
        """CUDA answers in milliseconds."""
        streams = CudaStreams()
        began = streams.record(fake_cuda.home)
        fake_cuda.work(1_234_567)
        assert streams.elapsed_ns(began, streams.record(fake_cuda.home)) == 1_234_567

    def test_torch_without_cuda_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names this torch and the way out."""
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(UsageError, match=r"CUDA build of torch.*--device cpu"):
            require_cuda()

    def test_machine_without_gpu_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names what is missing and the way out."""
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UsageError, match=r"NVIDIA GPU.*--device cpu"):
            require_cuda()

    def test_context_gets_all_hardware_queues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA starts with the most connections; the program still reads its own setting."""
        seen: list[str | None] = []
        monkeypatch.setattr(cuda, "require_cuda", lambda: None)
        monkeypatch.setenv(cuda.CONNECTIONS, "1")
        monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ[cuda.CONNECTIONS]))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        cuda.start_cuda()
        assert seen == ["32"]
        assert os.environ[cuda.CONNECTIONS] == "1"

    def test_memory_is_what_torch_cuda_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Peaks by step and reserved bytes; resets are ours only where steps are told apart."""
        peaks, resets = iter([5, 9, 7]), []
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 20)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
        tracker = CudaMemoryTracker(per_step=True)
        tracker.start()
        tracker.step_ended()
        tracker.step_ended()
        record = tracker.stop()
        assert (record.peak_bytes, record.peak_step, record.reserved_bytes) == (9, 1, 20)
        assert record.step_peak_bytes == (5, 9, 7)
        assert len(resets) == 4

    def test_every_rank_sees_device_0(self) -> None:
        """One GPU serves any rank: a program picks its device by LOCAL_RANK."""
        shared = RankEnvironment(rank=5, world_size=16, shares_device=True).variables()
        assert (shared["LOCAL_RANK"], shared["LOCAL_WORLD_SIZE"], shared["RANK"]) == ("0", "8", "5")


def test_capture_without_gpu_says_so(tmp_path: Path) -> None:
    """``--device cuda`` on a machine without one ends before the script starts."""
    spec = CaptureSpec(
        rank=0,
        world_size=8,
        local_world_size=8,
        target="nothing.py",
        is_module=False,
        args=(),
        device="cuda",
        samples=1,
        step_marker=None,
        track_memory=True,
        communication_load=False,
        payloads=str(tmp_path),
        out=str(tmp_path),
    )
    with pytest.raises(UsageError, match="--device cpu"):
        capture_rank(spec)
