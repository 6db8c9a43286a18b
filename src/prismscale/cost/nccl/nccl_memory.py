"""Device memory that NCCL holds outside torch's allocator: the buffers of its connections.

A communicator connects on demand and keeps its connections. Every channel of a connection has a
buffer for each of NCCL's three protocols (``init.cc``: 4 MiB for Simple, 512 KiB for LL, 4,800 KiB
for LL128), and CUDA maps device memory in pages of 2 MiB. Over NVLink that is 12 MiB at the
receiver and a page at the sender: all-to-all among 8 H100 takes 3.28 GB on each (32 channels to 7
peers, NVIDIA/nccl issue 1685, from which the page at the sender was inferred). Over a network card
both sides have buffers.

Collectives use rings and trees; in both a GPU has the same two neighbours in its node. Sends and
receives have channels of their own to each peer in the node, and one pool for all peers in other
nodes (``NCCL_SHARED_STEPS`` x 128 KiB for each channel).

NVLink SHARP, on GPUs that multicast, has a further buffer: for each member in the node and each of
its channels two of ``NCCL_STEPS`` = 8 chunks, and a page of credits (``nvls.cc``; logs of 8 H100:
"nvlsTotalSize 268435456"). NCCL sets it up at the first all-reduce with NVLink SHARP, in groups of
more than two GPUs in a node.

Assumptions: a group with one GPU in a node has 4 channels there; rings and trees cross nodes on
equally many GPUs; the first ``all_reduce`` of a group uses NVLink SHARP where the group can;
gathers and scatters do not use it, because their buffers are not registered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prismscale.errors import UsageError

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
LL_BYTES = 512 << 10
LL128_BYTES = 4800 << 10
SHARED_STEPS = 16
SHARED_CHUNK_BYTES = 128 << 10
MESSAGE_CHANNELS = 32
"""Channels of sends and receives to each peer."""
NETWORK_CHANNELS = 4
"""Channels of collectives in a group with one GPU in a node."""
MOST_CHANNELS = 64
"""Largest number of channels that NCCL uses."""
SHARP_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SharpSettings:
    """Settings of NVLink SHARP, which sums in the switch."""

    channels: int
    """Channels in a group within one node."""
    channels_across: int
    """Channels in a group over several nodes."""
    chunk_bytes: int = 128 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclSettings:
    """The settings that decide how much memory a connection takes."""

    channels: int
    """Channels of collectives among GPUs of a node."""
    gpus_per_node: int
    simple_bytes: int = 4 * MIB
    sharp: SharpSettings | None = None
    """None where GPUs do not multicast, or the program has switched NVLink SHARP off."""

    def __post_init__(self) -> None:
        if self.channels < 1 or self.gpus_per_node < 1 or self.simple_bytes < 1:
            raise UsageError(
                f"NCCL with {self.channels} channels, {self.gpus_per_node} GPUs in a node and "
                f"buffers of {self.simple_bytes} bytes; each has to be at least 1"
            )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all protocols' buffers of one channel of a connection."""
        return _pages(self.simple_bytes + LL_BYTES + LL128_BYTES)

    @property
    def receive_bytes(self) -> int:
        """Bytes of a channel that receives over NVLink."""
        return self.buffer_bytes + PAGE_BYTES

    @property
    def both_bytes(self) -> int:
        """Bytes of a channel that sends to and receives from a peer over NVLink."""
        return self.receive_bytes + PAGE_BYTES


def settings_from_environment(
    channels: int,
    gpus_per_node: int,
    environment: Mapping[str, str] = os.environ,
    *,
    sharp: SharpSettings | None = None,
) -> NcclSettings:
    """Return the settings of a GPU with ``channels`` channels, as NCCL's variables change them.

    The variables are ``NCCL_BUFFSIZE``, ``NCCL_MIN_NCHANNELS``, ``NCCL_MAX_NCHANNELS``,
    ``NCCL_NVLS_ENABLE`` and ``NCCL_NVLS_CHUNKSIZE``.

    Raises:
        UsageError: a variable that must be a number is not.
    """
    most = _number(environment, "NCCL_MAX_NCHANNELS", MOST_CHANNELS)
    least = _number(environment, "NCCL_MIN_NCHANNELS", 1)
    if environment.get("NCCL_NVLS_ENABLE", "").strip() == "0":
        sharp = None
    if sharp is not None:
        sharp = SharpSettings(
            channels=max(min(sharp.channels, most), least),
            channels_across=max(min(sharp.channels_across, most), least),
            chunk_bytes=_number(environment, "NCCL_NVLS_CHUNKSIZE", sharp.chunk_bytes),
        )
    return NcclSettings(
        channels=max(min(channels, most), least),
        gpus_per_node=gpus_per_node,
        simple_bytes=_number(environment, "NCCL_BUFFSIZE", 4 * MIB),
        sharp=sharp,
    )


@dataclass(kw_only=True, slots=True)
class Communicator:
    """The connections of one rank in one group."""

    settings: NcclSettings
    ranks: tuple[int, ...]
    """Global ranks in group order."""
    rank: int
    """The global rank whose memory this is."""
    has_rings: bool = False
    reduces: bool = False
    """Whether an all-reduce has run."""
    sends_to: set[int] = field(default_factory=set)
    receives_from: set[int] = field(default_factory=set)

    def connect_rings(self, *, reduces: bool = False) -> None:
        """Note that a collective runs; ``reduces`` says whether it is an all-reduce."""
        self.has_rings = True
        self.reduces = self.reduces or reduces

    def connect_messages(self, *, sends_to: Sequence[int], receives_from: Sequence[int]) -> None:
        """Note that sends and receives with these global ranks run."""
        self.sends_to.update(sends_to)
        self.receives_from.update(receives_from)

    @property
    def n_bytes(self) -> int:
        """Bytes that NCCL holds for this group on this rank's GPU."""
        rings = self._ring_bytes() if self.has_rings else 0
        return rings + self._sharp_bytes() + self._message_bytes()

    def _ring_bytes(self) -> int:
        settings = self.settings
        if len(self.ranks) < 2:
            return 0
        local = sum(self._is_near(rank) for rank in self.ranks)
        over_network = 2 * settings.buffer_bytes
        if local == 1:
            return NETWORK_CHANNELS * 2 * over_network  # a ring and a tree
        neighbours = min(local - 1, 2)
        n_bytes = settings.channels * neighbours * settings.both_bytes
        if local < len(self.ranks):
            # Each channel leaves the node once for its ring and once for its tree.
            n_bytes += 2 * settings.channels * over_network // local
        return n_bytes

    def _sharp_bytes(self) -> int:
        sharp, local = self.settings.sharp, sum(map(self._is_near, self.ranks))
        if sharp is None or not self.reduces or local <= 2:
            return 0
        channels = sharp.channels if local == len(self.ranks) else sharp.channels_across
        buffer = local * channels * 2 * SHARP_STEPS * sharp.chunk_bytes
        return _pages(buffer) + PAGE_BYTES

    def _message_bytes(self) -> int:
        settings = self.settings
        near_sends = sum(map(self._is_near, self.sends_to))
        near_receives = sum(map(self._is_near, self.receives_from))
        n_bytes = MESSAGE_CHANNELS * near_sends * PAGE_BYTES
        n_bytes += MESSAGE_CHANNELS * near_receives * settings.receive_bytes
        pool = MESSAGE_CHANNELS * SHARED_STEPS * SHARED_CHUNK_BYTES
        pools = (near_sends < len(self.sends_to)) + (near_receives < len(self.receives_from))
        return n_bytes + pools * pool

    def _is_near(self, rank: int) -> bool:
        """Return whether ``rank`` is in this rank's node."""
        gpus = self.settings.gpus_per_node
        return rank // gpus == self.rank // gpus


def _pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} is {text!r}; it has to be a whole number, at least 1")
    return int(text)
