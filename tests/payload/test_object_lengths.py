"""Lengths of pickled objects: alike on all ranks of a job, and in all steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from prismscale.emulation.hook import Collective
from prismscale.errors import FormatError
from prismscale.payload.combine import combine
from prismscale.payload.mirror import CompositePayload, MirrorPayload
from prismscale.payload.object_lengths import ObjectLengths, rounded
from prismscale.payload.objects import MIRROR
from prismscale.payload.recorded import RecordedPayload
from support.emulation import emulated


@contextmanager
def job(folder: Path) -> Iterator[ObjectLengths]:
    """One rank of a job whose ranks share ``folder``."""
    lengths = ObjectLengths()
    with lengths.shared_in(folder):
        yield lengths


def one_call(lengths: ObjectLengths, own: int) -> int:
    """What a rank with ``own`` bytes takes for the collective of this line."""
    return lengths.agreed(lengths.next_call("gather", 0), 0, own)


def test_the_first_rank_decides_for_all(tmp_path: Path) -> None:
    """A later one with a longer pickle says the same."""
    with job(tmp_path) as first, job(tmp_path) as second:
        assert one_call(first, 184_340) == rounded(184_340)
        assert one_call(second, 400_000) == rounded(184_340)


def test_a_call_keeps_its_length_from_step_to_step(tmp_path: Path) -> None:
    """Whoever comes first in a later step."""
    with job(tmp_path) as mine, job(tmp_path) as other:
        found = [(one_call(mine, 1_000), one_call(other, 2_000))]
        found += [(one_call(mine, 1_001), one_call(other, 2_001)) for _ in range(3)]
    assert len(set(found[1:])) == 1


def test_another_content_has_another_length(tmp_path: Path) -> None:
    """As when an optimizer's state appears after the first step."""
    with job(tmp_path) as lengths:
        assert [one_call(lengths, own) for own in (1_000, 9_000)] == [1_024, 9_216]


def test_a_damaged_length_is_told(tmp_path: Path) -> None:
    """With what to do."""
    (tmp_path / "gather.r0.n1.0.length").write_text("long")
    with job(tmp_path) as lengths, pytest.raises(FormatError, match="capture again"):
        one_call(lengths, 10)


@pytest.mark.parametrize("first", [0, 1])
def test_gathered_objects_of_unequal_ranks_have_one_length(first: int, tmp_path: Path) -> None:
    """Each still gets its own object in every place, also one that the length cuts."""
    objects = ["x" * 184_340, "y" * 300_000]
    n_bytes = []
    for rank in (first, 1 - first):
        with ExitStack() as stack:
            stack.enter_context(MIRROR.shared_in(tmp_path))
            hook = stack.enter_context(emulated(rank, 2))
            gathered = [None] * 2
            dist.all_gather_object(gathered, objects[rank])
            assert gathered == [objects[rank]] * 2
            n_bytes.append([c.n_bytes for c in hook.collectives])
    assert n_bytes[0] == n_bytes[1]


class OnePeer:
    """Gathers what this rank gives and what the other of two gave: the same, unless it is known."""

    def __init__(self, rank: int, given: list[torch.Tensor]) -> None:
        self.rank, self.given = rank, iter(given)
        self.gives: list[torch.Tensor] = []

    def fill(self, collective: Collective) -> None:
        """Fill the outputs."""
        own = collective.inputs[0].clone()
        self.gives.append(own)
        combine(collective, {self.rank: [own], 1 - self.rank: [next(self.given, own)]})


def test_an_object_too_long_for_the_length_is_not_what_a_peer_receives(tmp_path: Path) -> None:
    """The peer gets its own in that place, and the rank itself gets the peer's, which fits."""
    objects: list[object] = ["short", {"long": "y" * 3_000}]
    gives: list[list[torch.Tensor]] = [[], []]
    for rank in (0, 1, 0):
        with ExitStack() as stack:
            stack.enter_context(MIRROR.shared_in(tmp_path))
            payload = OnePeer(rank, gives[1 - rank])
            stack.enter_context(emulated(rank, 2, payload=payload))
            gathered: list[object] = [None] * 2
            dist.all_gather_object(gathered, objects[rank])
        gives[rank] = payload.gives
        assert gathered == (objects if rank else ["short", "short"])


def test_a_broadcast_too_large_to_be_kept_is_whole(tmp_path: Path) -> None:
    """Its length is recorded and its bytes are not: the rank's own object stands in."""
    for rank, mine in enumerate(["x" * 3_000_000, {"y": 1}]):
        payload = CompositePayload([RecordedPayload(tmp_path)], MirrorPayload())
        with emulated(rank, 2, payload=payload):
            objects = [mine]
            dist.broadcast_object_list(objects, src=0)
            assert objects == [mine]
