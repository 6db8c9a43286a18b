"""The order in which a real backend runs communications, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.emulation.hook import Captures, Collective
from prismscale.graph.node import CollectiveOp

UNORDERED = 0
GLOO_THREADS = 2
"""Number of a group's collectives that gloo runs at a time."""


def ordering(batch: Sequence[Collective]) -> tuple[str, int]:
    """Return the lane of a batch and how many batches it runs at a time (0: without order).

    NCCL puts a group's collectives and batched point-to-point on the group's one stream, and a
    single send or recv on a stream of that pair. gloo runs one collective of a group on each of
    its threads and keeps no order between point-to-point messages. A barrier of symmetric memory
    waits on the stream that issues it; barriers of one channel run in order.
    """
    group, op = batch[0].group, batch[0].op
    name = group.name or f"group {group.group_index}"
    if op == CollectiveOp.SYMM_MEM_BARRIER:
        return f"{name} channel {batch[0].tag}", 1
    if group.backend == "gloo":
        return (f"{name} p2p", UNORDERED) if op.is_p2p else (name, GLOO_THREADS)
    if op.is_p2p and len(batch) == 1:
        # Named by the peer's distance, so that ranks in the same role name the lane alike.
        return f"{name} pair {(batch[0].root - group.group_rank) % group.size}", 1
    return name, 1


def blocks_host(batch: Sequence[Collective]) -> bool:
    """Return whether waiting for the batch stops the program, not only its stream.

    Barriers do, and so do host tensors, whose values must be there when the host reads them.
    """
    if batch[0].op == CollectiveOp.SYMM_MEM_BARRIER:
        return False
    return all(t.is_cpu for c in batch for t in (*c.inputs, *c.outputs))


def is_in_host_memory(batch: Sequence[Collective]) -> bool:
    """Return whether the batch never reaches the device: host tensors, or a gloo barrier."""
    tensors = [t for c in batch for t in (*c.inputs, *c.outputs)]
    return all(t.is_cpu for t in tensors) if tensors else batch[0].group.backend == "gloo"


def takes_host(batch: Sequence[Collective]) -> bool:
    """Return whether the host issues the batch to its device: replays of graphs take it no time."""
    return not Captures.replaying and not is_in_host_memory(batch)
