"""What NCCL's connections take on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.cost.nccl.nccl_memory import (
    MESSAGE_CHANNELS,
    MIB,
    Communicator,
    NcclSettings,
    SharpSettings,
    settings_from_environment,
)
from prismscale.errors import UsageError

SETTINGS = NcclSettings(channels=16, gpus_per_node=8)
RANKS = st.lists(st.integers(0, 31), min_size=1, max_size=16, unique=True)


def communicator(*ranks: int, settings: NcclSettings = SETTINGS) -> Communicator:
    """The first rank's in a group of ``ranks``."""
    return Communicator(settings=settings, ranks=ranks, rank=ranks[0])


def test_nothing_is_held_before_something_communicates() -> None:
    """NCCL connects on demand."""
    assert communicator(*range(8)).n_bytes == 0


def test_a_channel_over_nvlink_takes_whole_pages() -> None:
    """9.2 MiB of buffers are five pages; a page more at either end."""
    assert (SETTINGS.buffer_bytes, SETTINGS.both_bytes) == (10 * MIB, 14 * MIB)


def test_all_to_all_connects_every_peer_in_the_node() -> None:
    """Each on channels of its own."""
    node = communicator(*range(8))
    node.connect_messages(sends_to=range(1, 8), receives_from=range(1, 8))
    assert node.n_bytes == 7 * MESSAGE_CHANNELS * SETTINGS.both_bytes


def test_rings_have_two_neighbours_however_large_the_node() -> None:
    """A pair is a single one; a lone rank has none."""
    held = []
    for count in (1, 2, 3, 8):
        group = communicator(*range(count))
        group.connect_rings()
        held.append(group.n_bytes // SETTINGS.both_bytes)
    assert held == [0, 16, 32, 32]


def test_peers_in_other_nodes_share_a_pool() -> None:
    """The hundredth costs nothing."""
    one, many = communicator(0, 8), communicator(0, *range(8, 800, 8))
    one.connect_messages(sends_to=[8], receives_from=[8])
    many.connect_messages(sends_to=many.ranks[1:], receives_from=many.ranks[1:])
    assert one.n_bytes == many.n_bytes > 0


def test_larger_groups_across_nodes_hold_no_more() -> None:
    """Rings have as many neighbours at any scale."""
    held = []
    for nodes in (2, 4, 512):
        group = communicator(*range(8 * nodes))
        group.connect_rings()
        held.append(group.n_bytes)
    assert len(set(held)) == 1


@given(RANKS, st.data())
def test_connecting_more_never_holds_less(ranks: list[int], data: st.DataObject) -> None:
    """Whatever the group, and whoever is connected when."""
    group = communicator(*ranks)
    before = 0
    for _ in range(4):
        peers = data.draw(st.lists(st.sampled_from(ranks[1:]), unique=True)) if ranks[1:] else []
        if data.draw(st.booleans()):
            group.connect_rings()
        group.connect_messages(sends_to=peers, receives_from=peers[1:])
        assert group.n_bytes >= before
        before = group.n_bytes


def test_nccls_own_variables_are_heeded() -> None:
    """As documented by NVIDIA."""
    few = settings_from_environment(24, 8, {"NCCL_MAX_NCHANNELS": "4", "NCCL_BUFFSIZE": "1048576"})
    assert (few.channels, few.simple_bytes, few.buffer_bytes) == (4, MIB, 8 * MIB)
    assert settings_from_environment(16, 8, {"NCCL_MIN_NCHANNELS": "32"}).channels == 32


@pytest.mark.parametrize("text", ["many", "0", "-4"])
def test_a_variable_that_is_no_number_is_refused(text: str) -> None:
    """By its name."""
    with pytest.raises(UsageError, match=f"NCCL_BUFFSIZE is '{text}'"):
        settings_from_environment(16, 8, {"NCCL_BUFFSIZE": text})


SHARP = replace(SETTINGS, sharp=SharpSettings(channels=16, channels_across=32))


def test_nvlink_sharp_has_the_buffer_of_nccls_log() -> None:
    """8 H100: 256 MiB, and a page of credits; only where something is summed for all."""
    rings, sums = communicator(*range(8), settings=SHARP), communicator(*range(8), settings=SHARP)
    rings.connect_rings()
    sums.connect_rings(reduces=True)
    assert sums.n_bytes - rings.n_bytes == 268_435_456 + 2 * MIB


def test_a_pair_does_not_reduce_in_the_switch() -> None:
    """Nor do peers of which each is in a node of its own."""
    for ranks in ((0, 1), range(0, 64, 8)):
        with_sharp, without = communicator(*ranks, settings=SHARP), communicator(*ranks)
        with_sharp.connect_rings(reduces=True)
        without.connect_rings(reduces=True)
        assert with_sharp.n_bytes == without.n_bytes


def test_a_group_across_nodes_has_its_own_channels() -> None:
    """The buffer is for the members in this node."""
    held = []
    for ranks in (range(4), range(4, 12)):  # four in rank 0's node, or in rank 4's
        both = [communicator(*ranks, settings=settings) for settings in (SHARP, SETTINGS)]
        for one in both:
            one.connect_rings(reduces=True)
        held.append(both[0].n_bytes - both[1].n_bytes - 2 * MIB)
    assert held == [4 * 32 * MIB, 4 * 64 * MIB]


def test_nvlink_sharp_can_be_switched_off() -> None:
    """And its chunks changed, by NCCL's variables."""
    off = settings_from_environment(16, 8, {"NCCL_NVLS_ENABLE": "0"}, sharp=SHARP.sharp)
    large = settings_from_environment(16, 8, {"NCCL_NVLS_CHUNKSIZE": "524288"}, sharp=SHARP.sharp)
    assert off.sharp is None
    assert large.sharp is not None
    assert large.sharp.chunk_bytes == 524288
