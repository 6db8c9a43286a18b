"""Computes each member's outputs of a collective from the inputs of all members.

Reductions add in group order, and half-precision floats in single precision, so that all members
get the same result to the bit. Programs that compare ranks would notice a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective
from prismscale.errors import MismatchError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import (
    HALF,
    KIND,
    accumulate,
    chunk,
    divide,
    factor_of,
    kind_of,
    scale,
    signed,
)
from prismscale.payload.combine import split_rows
from prismscale.switching.stored_values import Given

Read = Callable[[int], Given]
"""Returns the contribution of the member with a given group rank."""


def reduced(size: int, reduce_op: ReduceOp | None, read: Read, *, count: int) -> list[torch.Tensor]:
    """Reduce each of the first ``count`` tensors over all ``size`` members."""
    first = read(0).tensors[:count]
    totals = [_scratch(t, torch.float32 if t.dtype in HALF else t.dtype) for t in first]
    for member in range(1, size):
        for total, term in zip(totals, read(member).tensors[:count], strict=True):
            accumulate(signed(total), signed(term), _kind(reduce_op), 1)
    for total in totals:
        _finish(total, reduce_op, size)
    return [
        total if total.dtype == term.dtype else _scratch(total, term.dtype)
        for total, term in zip(totals, first, strict=True)
    ]


def _scratch(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in NumPy's memory, because torch's memory is measured for the program."""
    raw = np.empty(like.numel() * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(like.shape).copy_(like)


def _kind(reduce_op: ReduceOp | None) -> object:
    kind = kind_of(reduce_op)
    return KIND.SUM if kind == KIND.PREMUL_SUM else kind


def _finish(total: torch.Tensor, reduce_op: ReduceOp | None, size: int) -> None:
    kind = kind_of(reduce_op)
    if kind == KIND.PREMUL_SUM:
        scale(signed(total), factor_of(reduce_op))
    elif kind == KIND.AVG:
        divide(total, size)


def fill(collective: Collective, read: Read, result: Callable[[], Given]) -> None:
    """Fill the outputs of ``collective``. ``result`` reads the result computed for all members."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _fill(collective, read, result)


def _fill(collective: Collective, read: Read, result: Callable[[], Given]) -> None:
    op, outputs, group = collective.op, collective.outputs, collective.group
    if op is CollectiveOp.ALL_REDUCE:
        _copy(outputs, result().tensors)
    elif op is CollectiveOp.REDUCE:
        if collective.root == group.group_rank:
            count = len(outputs)
            _copy(outputs, reduced(group.size, collective.reduce_op, read, count=count))
    elif op is CollectiveOp.REDUCE_SCATTER:
        _scatter_reduced(collective, result().tensors)
    elif op in (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER):
        if outputs:
            _gather(collective, read)
    elif op is CollectiveOp.BROADCAST:
        if collective.root != group.group_rank:
            _copy(outputs, read(collective.root).tensors)
    elif op is CollectiveOp.SCATTER:
        _copy(outputs, read(collective.root).tensors[group.group_rank :])
    elif op is CollectiveOp.ALL_TO_ALL:
        _all_to_all(collective, read)
    elif op is CollectiveOp.RECV:
        _copy(outputs, read(collective.root).tensors)


def _copy(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for output, value in zip(outputs, values, strict=False):
        if output.numel() != value.numel():
            raise MismatchError(
                f"{value.numel():,} elements arrive where the program expects {output.numel():,}"
            )
        output.copy_(value.view(output.shape))


def _scatter_reduced(collective: Collective, totals: Sequence[torch.Tensor]) -> None:
    size, mine = collective.group.size, collective.group.group_rank
    is_flat = len(totals) == len(collective.outputs)
    for i, output in enumerate(collective.outputs):
        own = chunk(totals[i], mine, output) if is_flat else totals[i * size + mine]
        output.copy_(own.view(output.shape))


def _gather(collective: Collective, read: Read) -> None:
    size, outputs = collective.group.size, collective.outputs
    for member in range(size):
        for i, value in enumerate(read(member).tensors):
            if len(outputs) == len(collective.inputs):
                slot = outputs[i].view(-1).view(size, -1)[member]
            else:
                slot = outputs[i * size + member]
            _copy([slot], [value])


def _all_to_all(collective: Collective, read: Read) -> None:
    size, mine = collective.group.size, collective.group.group_rank
    slots = split_rows(collective.outputs, collective.output_splits, size)
    for member in range(size):
        given = read(member)
        _copy([slots[member]], [split_rows(given.tensors, given.splits, size)[mine]])
