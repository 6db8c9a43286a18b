"""In what order a real backend runs communications, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp

UNORDERED = 0
GLOO_THREADS = 2
"""Collectives of a group that gloo runs at a time."""


def ordering(batch: Sequence[Collective]) -> tuple[str, int]:
    """The lane of a batch, and how many batches that lane runs at a time (0: without order).

    NCCL puts a group's collectives and batched point-to-point on the group's one stream, and a
    single send or recv on a stream of that pair. gloo runs one collective of a group on each of
    its threads and keeps no order between point-to-point messages. Barriers of symmetric memory
    wait on the streams that ask for them; those of one channel are in order.
    """
    group, op = batch[0].group, batch[0].op
    name = group.name or f"group {group.group_index}"
    if op == CollectiveOp.SYMM_MEM_BARRIER:
        return f"{name} channel {batch[0].tag}", 1
    if group.backend == "gloo":
        return (f"{name} p2p", UNORDERED) if op.is_p2p else (name, GLOO_THREADS)
    if op.is_p2p and len(batch) == 1:
        # By how far away the peer is: ranks that do the same with their own peers are alike.
        return f"{name} pair {(batch[0].root - group.group_rank) % group.size}", 1
    return name, 1


def blocks_host(batch: Sequence[Collective]) -> bool:
    """Whether waiting for the batch stops the program, not only its stream: barriers do, and what
    the host reads from its own memory must be there."""
    if batch[0].op == CollectiveOp.SYMM_MEM_BARRIER:
        return False
    return all(t.is_cpu for c in batch for t in (*c.inputs, *c.outputs))


def is_in_host_memory(batch: Sequence[Collective]) -> bool:
    """Whether the batch never sees the device: the host's own tensors, or a barrier among hosts."""
    tensors = [t for c in batch for t in (*c.inputs, *c.outputs)]
    return all(t.is_cpu for t in tensors) if tensors else batch[0].group.backend == "gloo"
