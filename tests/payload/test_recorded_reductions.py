"""Reductions of recorded contributions: what the recorded run had, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.live.recorded_answers import RecordedAnswers
from prismscale.payload.arithmetic import KIND
from prismscale.payload.recordings.known import KnownCommunication
from prismscale.payload.recordings.recorded_job import RecordedJob
from prismscale.payload.recordings.recording_writer import RecordingWriter
from prismscale.payload.recordings.remainders import exact
from prismscale.switching.outcomes import reduced
from prismscale.switching.stored_values import Given

RANKS = (0, 1, 2)
KINDS = {"SUM": KIND.SUM, "AVG": KIND.AVG, "MAX": KIND.MAX, "PRODUCT": KIND.PRODUCT}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8)


def average(rank: int, tensor: torch.Tensor) -> Collective:
    """One rank's part in an average that rank 0 gets."""
    group = GroupHandle(group_index=1, ranks=RANKS, group_rank=rank, name="", backend="gloo")
    return Collective(
        op=CollectiveOp.REDUCE,
        group=group,
        inputs=(tensor,),
        outputs=(tensor,),
        n_bytes=tensor.nbytes,
        root=0,
        reduce_op=ReduceOp(ReduceOp.AVG),
    )


def recorded(folder: Path, contributions: Sequence[torch.Tensor]) -> RecordedJob:
    """A job that averaged them once."""
    for rank, tensor in zip(RANKS, contributions, strict=True):
        writer = RecordingWriter(folder, rank, ["all"], 1 << 20)
        writer.gave("g.c.0", average(rank, tensor), RANKS, 0)
        writer.close()
    recording = RecordedJob.load(folder)
    assert recording is not None
    return recording


@given(
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(KINDS)),
    values=st.lists(st.integers(0, 300), min_size=2, max_size=9),
)
def test_contributions_are_reduced_as_with_real_values(
    dtype: torch.dtype, name: str, values: list[int]
) -> None:
    """Half-precision floats in single precision, and an average divided at the end."""
    given_ = [torch.tensor([value]).to(dtype) for value in values]
    size, operation = len(given_), ReduceOp(getattr(ReduceOp, name))
    (then,) = reduced(size, operation, lambda m: Given(tensors=(given_[m],), splits=()), count=1)
    found = exact(given_, KINDS[name], size=size)
    assert found.dtype == dtype
    assert torch.equal(found, then)
    assert [t.item() for t in given_] == [torch.tensor(v).to(dtype).item() for v in values]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [(torch.bfloat16, (256, 1, 1), 86.0), (torch.int64, (1, 2, 5), 2)],
    ids=str,
)
def test_a_recorded_average_is_what_the_recorded_run_had(
    tmp_path: Path, dtype: torch.dtype, values: Sequence[int], expected: float
) -> None:
    """258 / 3 is 86; 256 / 3, where each term is rounded to bfloat16, is 85.5."""
    recording = recorded(tmp_path, [torch.tensor([value], dtype=dtype) for value in values])
    known = KnownCommunication(
        recording=recording,
        name="g.c.0",
        op=CollectiveOp.REDUCE,
        ranks=RANKS,
        receiver=0,
        root=0,
        kind=KIND.AVG,
    )
    assert known.result(0, 1).item() == expected


def test_a_live_ranks_average_of_integers_is_cut(tmp_path: Path) -> None:
    """1, 2 and 5 were recorded; with 4 in place of the 1 the average is 3."""
    recording = recorded(tmp_path, [torch.tensor([value]) for value in (1, 2, 5)])
    answers = RecordedAnswers(recording=recording, live=frozenset({0}))
    own = torch.tensor([4])
    answers.fill("g.c.0", average(0, own), {0: [own.clone()]})
    assert own.item() == 3
