"""A program's own memory snapshots on a device that is not there, read by torch's own viewer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

MIB = 1 << 20


def held() -> torch.Tensor:
    return torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture
def dumped(tmp_path: Path) -> dict[str, Any]:
    """Of a program that takes two blocks and gives one back."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = held()
    given_back = torch.ones(64, device="cuda")
    del given_back
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    found: dict[str, Any] = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    return found


def test_events_have_their_frames(dumped: dict[str, Any]) -> None:
    """Of what asked for the block, however small; oldest first."""
    events = dumped["device_traces"][torch.cuda.current_device()]
    names = [event["frames"][0]["name"] for event in events if event["action"] == "alloc"]

    assert names == ["held", "dumped"]
    assert [e["size"] for e in events if e["action"] == "free_requested"] == [256]


def test_blocks_have_their_frames(dumped: dict[str, Any]) -> None:
    """Of those that are held when the snapshot is taken."""
    blocks = [b for s in dumped["segments"] for b in s["blocks"] if b["frames"]]

    assert [b["frames"][0]["name"] for b in blocks if b["requested_size"] == 3 * MIB] == ["held"]


def test_torchs_own_viewer_reads_it(dumped: dict[str, Any]) -> None:
    """Its summaries and its pages."""
    assert "3.0MiB" in _memory_viz.trace(dumped)
    assert _memory_viz.segsum(dumped)
    assert "<html" in _memory_viz.trace_plot(dumped).lower()


def test_nothing_is_recorded_unless_asked_for() -> None:
    """Segments without a history, as on a GPU."""
    kept = held()
    found = torch.cuda.memory._snapshot()

    assert not any(found["device_traces"])
    assert sum(s["allocated_size"] for s in found["segments"]) >= 3 * MIB
    del kept
