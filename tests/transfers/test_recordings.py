"""What is recorded of a job, and how it is read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import FormatError, StorageError, UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.recordings.blob_store import LIMIT_BYTES
from prismscale.payload.recordings.recorded_job import RecordedJob, recorded_by_selection
from prismscale.payload.recordings.recording_writer import RESULT, RecordingWriter
from prismscale.payload.recordings.selection import RecordSelection, refuse_idle_selections

RANKS = (0, 1, 2, 3)


def all_reduce(rank: int, tensor: torch.Tensor, name: str = "mesh_tp") -> Collective:
    """One rank's part."""
    group = GroupHandle(group_index=1, ranks=RANKS, group_rank=rank, name=name, backend="gloo")
    return Collective(
        op=CollectiveOp.ALL_REDUCE,
        group=group,
        inputs=(tensor,),
        outputs=(tensor,),
        n_bytes=tensor.nbytes,
    )


def record(folder: Path, *selections: str, steps: int = 3, limit: int = LIMIT_BYTES) -> None:
    """Two ranks that all-reduce once a step."""
    for rank in (0, 1):
        writer = RecordingWriter(folder, rank, selections, limit)
        for step in range(steps):
            given = all_reduce(rank, torch.full((256,), float(10 * rank + step)))
            writer.gave(f"g.c.{step}", given, RANKS, step)
            if rank == 0:
                writer.came_to(f"g.c.{step}", given, RANKS, step, [torch.full((256,), 99.0)])
        writer.close()


def test_what_was_given_is_read(tmp_path: Path) -> None:
    """By name and rank, the result too."""
    record(tmp_path, "all")
    recording = RecordedJob.load(tmp_path)
    assert recording is not None
    for step in range(3):
        for rank, value in ((0, step), (1, 10 + step), (RESULT, 99)):
            gift = recording.gift(f"g.c.{step}", rank)
            assert gift is not None
            (tensor,) = recording.tensors(f"g.c.{step}", gift)
            assert torch.equal(tensor, torch.full((256,), float(value)))
    assert recorded_by_selection(tmp_path) == [6]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("group=tp,step=1", ["g.c.1"]),
        ("group=mesh_tp,step=1-2", ["g.c.1", "g.c.2"]),
        ("step=0+2", ["g.c.0", "g.c.2"]),
        ("op=broadcast", []),
        ("rank=5", []),
    ],
)
def test_only_what_is_selected_is_kept(tmp_path: Path, selection: str, names: list[str]) -> None:
    """By group, step, operation and rank."""
    record(tmp_path, selection)
    recording = RecordedJob.load(tmp_path)
    kept = [f"g.c.{k}" for k in range(3) if recording is not None and f"g.c.{k}" in recording]
    assert kept == names


def test_of_reductions_only_what_chosen_ranks_gave_is_kept(tmp_path: Path) -> None:
    """Beside the result, of which the rest is what is left."""
    record(tmp_path, "rank=1")
    recording = RecordedJob.load(tmp_path)
    assert recording is not None
    assert recording.gift("g.c.0", 0) is None
    assert recording.gift("g.c.0", 1) is not None
    assert recording.gift("g.c.0", RESULT) is not None


def test_what_is_alike_is_there_once(tmp_path: Path) -> None:
    """The result is the same in each step."""
    record(tmp_path, "all")
    blobs = [p for p in (tmp_path / "blobs").rglob("*") if p.is_file() and p.name != "bytes"]
    assert len(blobs) == 2 * 3 + 1


def test_a_recording_has_a_size(tmp_path: Path) -> None:
    """What does not fit is an error that names the option."""
    with pytest.raises(StorageError, match="--record-limit"):
        record(tmp_path, "all", limit=3000)


def test_damage_is_noticed(tmp_path: Path) -> None:
    """A byte that changed, a file that is gone, a list that was cut."""
    record(tmp_path, "all")
    recording = RecordedJob.load(tmp_path, pool_bytes=0)
    assert recording is not None
    gift = recording.gift("g.c.0", 0)
    assert gift is not None
    digest = gift.tensors[0].digest
    path = tmp_path / "blobs" / digest[:2] / digest[2:]
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(FormatError, match="damaged"):
        recording.tensors("g.c.0", gift)
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        recording.tensors("g.c.0", gift)
    index = tmp_path / "index-0.arrow"
    index.write_bytes(index.read_bytes()[:40])
    with pytest.raises(FormatError, match="no list of recorded communications"):
        RecordedJob.load(tmp_path)


def test_what_is_read_ahead_is_bounded_and_dropped(tmp_path: Path) -> None:
    """The pool holds what comes next on a channel, as far as it fits, and nothing that was used."""
    record(tmp_path, "all", steps=40)
    recording = RecordedJob.load(tmp_path, pool_bytes=10_000)
    assert recording is not None
    for step in range(40):
        for rank in (0, 1, RESULT):
            gift = recording.gift(f"g.c.{step}", rank)
            assert gift is not None
            recording.tensors(f"g.c.{step}", gift)
        if step == 5:
            deadline = time.monotonic() + 10
            while recording.most_ahead_bytes == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
    assert 0 < recording.most_ahead_bytes <= 10_000


@pytest.mark.parametrize(
    "text", ["tp", "group=", "steps=3", "step=x", "step=5-2", "op=allreduce", "step=1,step=2"]
)
def test_a_selection_that_says_nothing_is_an_error(text: str) -> None:
    """The text is named."""
    with pytest.raises(UsageError, match="--record"):
        RecordSelection.parse(text)


@pytest.mark.parametrize("op", ["barrier", "symm_mem_barrier"])
def test_a_selection_of_what_says_nothing_is_an_error(op: str) -> None:
    """Before the job runs, and with the reason."""
    with pytest.raises(UsageError, match=f"op '{op}'; nothing is said in it; allowed: all_gather"):
        RecordSelection.parse(f"op={op}")


@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_message_may_be_selected_at_either_end(op: str) -> None:
    """Its sender says what is in it."""
    assert RecordSelection.parse(f"op={op}").covers(CollectiveOp.SEND, "", RANKS, 0)


def test_a_selection_that_recorded_nothing_is_an_error() -> None:
    """It is misspelt."""
    with pytest.raises(UsageError, match="'group=tp' fits no communication"):
        refuse_idle_selections(["all", "group=tp"], [4, 0])
