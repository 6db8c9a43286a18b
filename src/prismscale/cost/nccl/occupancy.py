"""How much slower kernels run while communications occupy multiprocessors.

NCCL runs a thread block for each channel that a communication uses. A block holds a multiprocessor
from its rank's arrival until the communication ends, also while it waits for other ranks. Where
``n`` of a GPU's ``S`` multiprocessors are held, a kernel that needs them all takes
``n / (S - n)`` longer. What was measured is a multiple of that, because the blocks take memory
bandwidth and power, too.

[Note: what was measured] On one H100 a copy of 4 to 32 blocks ran beside a matrix product, an
elementwise kernel and attention (``bench/gpu/overlap.py``, ``bench/results/h100/overlap.json``).
The multiples are medians over its five numbers of blocks. They are uncertain by a tenth: the time
alone was taken after other pauses than the one beside the copy, and for attention it came out
longer than beside four blocks, so attention has the multiple of elementwise kernels. Not used for
them: pytorch pull request 179937 (products 30 to 40 % slower on 8 H100), and NVIDIA/nccl issue 1428
(A100: products 1.76, attention 1.83, elementwise kernels 2.5 times as long beside an all-gather).
"""

from __future__ import annotations

from collections.abc import Mapping

from prismscale.graph.node import NodeKind

PRODUCTS = 2.15
ELSE = 0.945
"""By how many times ``n / (S - n)`` kernels take longer: matrix products, and all others."""
RING_CHANNELS = 16
RING_CHANNELS_OF: Mapping[str, int] = {"a100-80g": 24}
"""Channels of collectives among the GPUs of a node, by GPU; others have :data:`RING_CHANNELS`. Logs
show 24 on A100 and 16 on H100 (NVIDIA/nccl-tests issue 213). That newer GPUs have as many as H100
is an assumption."""
NEAR_MESSAGE_CHANNELS, FAR_MESSAGE_CHANNELS = 16, 2
"""Channels of a send or receive to a peer in the node, and in another node ("p2p channels per peer"
in logs of H800 and H20: NVIDIA/nccl issues 892 and 1189)."""
MOST_HELD = 0.5
"""Largest share of the multiprocessors that communications hold together: beyond what was measured
the law means nothing."""


def ring_channels(gpu: str) -> int:
    """Return NCCL's channels of collectives among the GPUs of a node; ``gpu`` is a preset's key."""
    return RING_CHANNELS_OF.get(gpu, RING_CHANNELS)


def blocks(kind: NodeKind, gpu: str, *, is_near: bool) -> int:
    """Return how many multiprocessors one communication holds on a rank's GPU.

    Args:
        kind: a collective, a send or a receive.
        gpu: key of the GPU's preset.
        is_near: whether its ranks reach each other over NVLink.
    """
    if kind in (NodeKind.SEND, NodeKind.RECV):
        return NEAR_MESSAGE_CHANNELS if is_near else FAR_MESSAGE_CHANNELS
    return ring_channels(gpu)


def slowdown(held: int, multiprocessors: int, product_share: float) -> float:
    """Return how many times as long computation takes beside communications, at least 1.

    Args:
        held: multiprocessors that the communications hold.
        multiprocessors: those of the GPU.
        product_share: fraction of the computation's own time that is matrix products, 0 to 1.
    """
    n = min(held, MOST_HELD * multiprocessors)
    multiple = PRODUCTS * product_share + ELSE * (1.0 - product_share)
    return 1.0 + multiple * n / (multiprocessors - n)
