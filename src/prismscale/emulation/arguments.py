"""Reads the many spellings of a collective's arguments into the fields of one record.

Every torch entry point has several overloads (a tensor or a list, an options object or a plain
reduction, one list or a list of lists). The functions here accept them all and copy no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp

SUM = ReduceOp(ReduceOp.SUM)
"""The reduction of a collective for which the program names none."""

_nbytes = attrgetter("nbytes")
_MERGEABLE = frozenset(
    {
        CollectiveOp.ALL_REDUCE,
        CollectiveOp.ALL_GATHER,
        CollectiveOp.REDUCE_SCATTER,
        CollectiveOp.BROADCAST,
        CollectiveOp.REDUCE,
    }
)


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """Return a tensor, a list of tensors, or a list of lists of tensors as one flat tuple."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if len(value) == 1 and not isinstance(value[0], torch.Tensor):
        return tuple(value[0])
    if value and not isinstance(value[0], torch.Tensor):
        return tuple(tensor for row in value for tensor in row)
    return tuple(value)


def byte_count(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of payload; for a sparse tensor, those of its indices and values."""
    try:
        return sum(map(_nbytes, tensors))
    except RuntimeError:  # torch defines no byte count for sparse tensors
        return sum(_sparse_nbytes(t) if t.is_sparse else t.nbytes for t in tensors)


def _sparse_nbytes(tensor: torch.Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes


def reduction(options: Any, op: Any = None) -> ReduceOp:
    """Return the reduction in an options object, a ``ReduceOp``, or one of its enum values."""
    value = op if op is not None else options
    if value is None:
        return SUM
    value = getattr(value, "reduceOp", value)
    # An enum value passes isinstance(value, ReduceOp), but lacks its fields.
    return value if type(value) is ReduceOp else ReduceOp(value)


def root_of(options: Any, root: int | None) -> int:
    """Return the root's group rank from an options object or a plain argument."""
    if root is not None:
        return root
    if isinstance(options, int):
        return options
    return int(getattr(options, "rootRank", 0))


def is_async(options: Any) -> bool:
    """Whether the program keeps the Work; C++ callers and old entry points always do."""
    return bool(getattr(options, "asyncOp", True))


def splits_of(sizes: Iterable[int], *, keep: bool) -> Sequence[int]:
    """Return the split sizes of an all_to_all, given as a list, a tuple or an array.

    They may be thousands of numbers, so a list is copied only with ``keep``: the program could then
    change it before the communication ends.
    """
    if isinstance(sizes, list | tuple):
        return tuple(sizes) if keep else sizes
    return tuple(map(int, sizes))


def merged(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return coalesced calls as one batch; neighbours of the same operation become one record.

    Point-to-point communications, all_to_all, gather, scatter and barrier stay separate.
    """
    batch: list[Collective] = []
    for collective in collectives:
        last = batch[-1] if batch else None
        if last is not None and _same_operation(last, collective):
            last.inputs += collective.inputs
            last.outputs += collective.outputs
            last.n_bytes += collective.n_bytes
            last.asynchronous |= collective.asynchronous
        else:
            batch.append(collective)
    return tuple(batch)


def _same_operation(first: Collective, second: Collective) -> bool:
    return (
        first.op in _MERGEABLE
        and first.op is second.op
        and first.root == second.root
        and first.reduce_op == second.reduce_op
        and _is_flat(first) == _is_flat(second)
    )


def _is_flat(collective: Collective) -> bool:
    return len(collective.inputs) == len(collective.outputs)
