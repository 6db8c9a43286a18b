"""``torch.save`` on the null device: what has no values takes no disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prismscale.devices.null import runtime
from prismscale.devices.null.saves.checkpoints import CheckpointLedger, CheckpointSaves
from prismscale.devices.null.saves.host_copies import LARGE_BYTES, HostCopies
from prismscale.devices.storage import Storage

BYTES_PER_S = 1e9
LARGE = 16 << 20


@pytest.fixture
def ledger() -> Iterator[CheckpointLedger]:
    """Saves as a captured rank does."""
    active = runtime.active()
    storage = Storage(write_bytes_per_s=BYTES_PER_S)
    ledger = CheckpointLedger(active.library, storage, lambda: 5)
    with CheckpointSaves(active.library, ledger, HostCopies(active.ledger)).active():
        yield ledger


def on_disk(path: Path) -> int:
    """Bytes that a file takes."""
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("to_host", [False, True], ids=["from the device", "copied before"])
def test_what_comes_from_the_device_takes_no_disk(
    ledger: CheckpointLedger, tmp_path: Path, to_host: bool
) -> None:
    """The file has its size, can be read, and writing it took its time."""
    path = tmp_path / "model.pt"
    weight = torch.randn(LARGE // 4, device="cuda")
    began_ns = runtime.active().library.ps_host_time_ns()
    torch.save({"weight": weight.cpu() if to_host else weight}, path)

    assert LARGE < path.stat().st_size < LARGE + 10_000
    assert on_disk(path) < 1 << 20
    assert torch.load(path, map_location="cpu")["weight"].shape == weight.shape
    assert [use.n_bytes for use in ledger.uses] == [path.stat().st_size]
    took_ns = runtime.active().library.ps_host_time_ns() - began_ns
    assert took_ns >= LARGE / BYTES_PER_S * 1e9


def test_what_the_host_made_is_written_as_it_is(ledger: CheckpointLedger, tmp_path: Path) -> None:
    """Beside what has no values, and in a file that the program opened."""
    path, made = tmp_path / "both.pt", torch.arange(LARGE // 8)
    with path.open("wb") as file:
        torch.save({"made": made, "weight": torch.randn(LARGE // 4, device="cuda")}, file)

    assert torch.equal(torch.load(path, map_location="cpu")["made"], made)
    assert LARGE < on_disk(path) < LARGE + (1 << 20)


def test_a_save_asks_for_no_values(ledger: CheckpointLedger, tmp_path: Path) -> None:
    """Nothing that the program does depends on them."""
    active = runtime.active()
    active.ledger.clear()
    torch.save(torch.randn(LARGE // 4, device="cuda"), tmp_path / "model.pt")

    assert active.ledger.uses() == []


def test_small_files_and_files_in_memory_are_no_checkpoints(
    ledger: CheckpointLedger, tmp_path: Path
) -> None:
    """They cost the program nothing but the copies."""
    torch.save({"step": 3}, tmp_path / "state.pt")
    torch.save(torch.zeros(LARGE_BYTES), io.BytesIO())

    assert torch.load(tmp_path / "state.pt") == {"step": 3}
    assert ledger.uses == []


def test_a_folder_that_is_not_there_is_told_as_ever(
    ledger: CheckpointLedger, tmp_path: Path
) -> None:
    """By torch itself."""
    with pytest.raises(RuntimeError, match="Parent directory"):
        torch.save({}, tmp_path / "nowhere" / "model.pt")
