"""Memory that a backend takes while it communicates, in the program's own allocator.

gloo flattens lists, gathers into one tensor and clones what it scatters, on torch's CPU allocator,
where it counts towards the program's peak. The sizes below were read off torch 2.13 with the
profiler's allocation events, one operation at a time. NCCL's buffers lie outside torch's allocator.

Both also keep the program's own tensors alive. A gloo handle holds inputs and outputs as long as it
lives. With NCCL, the program's streams must not reuse memory that is still being sent: an
asynchronous communication holds all its tensors until it is waited for, and its handle holds the
outputs (for a single send, the tensors sent) as long as it lives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp


def workspace_bytes(collective: Collective) -> int:
    """Return the bytes that gloo allocates for one communication."""
    op, group, n_bytes = collective.op, collective.group, collective.n_bytes
    is_list = len(collective.inputs) > 1 and len(collective.inputs) % group.size == 0
    if op == CollectiveOp.ALL_GATHER:
        return n_bytes
    if op == CollectiveOp.REDUCE_SCATTER:
        return n_bytes // group.size if is_list else n_bytes
    if op in (CollectiveOp.GATHER, CollectiveOp.SCATTER):
        return n_bytes if collective.root == group.group_rank else 0
    if op == CollectiveOp.ALL_TO_ALL:
        return 2 * n_bytes if is_list else 0
    if op == CollectiveOp.ALL_REDUCE:
        return n_bytes if len(collective.inputs) > 1 else 0
    return 0


def take_workspace(batch: Sequence[Collective]) -> torch.Tensor | None:
    """Allocate the memory that the backend would; dropping the result frees it."""
    if batch[0].group.backend != "gloo":
        return None
    n_bytes = sum(workspace_bytes(c) for c in batch)
    return torch.empty(n_bytes, dtype=torch.uint8) if n_bytes else None


def handle_keeps_inputs(batch: Sequence[Collective]) -> bool:
    """Return whether a batch's inputs live as long as its handle, and not only until the wait."""
    is_message = len(batch) == 1 and batch[0].op == CollectiveOp.SEND
    return is_message or batch[0].group.backend == "gloo"
