"""Copies a program's tensors to the flat buffers that messages are taken from, and back.

Buffers are in NumPy's memory, because torch's memory is measured for the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import torch

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import KIND, kind_of
from prismscale.payload.combine import split_rows
from prismscale.transfers.schedule import Algorithm, Shape

TRANSFERRED = frozenset(
    {
        CollectiveOp.ALL_REDUCE,
        CollectiveOp.ALL_GATHER,
        CollectiveOp.REDUCE_SCATTER,
        CollectiveOp.BROADCAST,
        CollectiveOp.REDUCE,
        CollectiveOp.GATHER,
        CollectiveOp.SCATTER,
        CollectiveOp.ALL_TO_ALL,
        CollectiveOp.SEND,
        CollectiveOp.RECV,
    }
)


def is_transferred(collective: Collective) -> bool:
    """Whether gloo would move data for it. Messages of a barrier hold no data."""
    tensors = collective.inputs or collective.outputs
    return (
        collective.op in TRANSFERRED
        and collective.group.size > 1
        and bool(tensors)
        and all(t.device.type == "cpu" for t in (*collective.inputs, *collective.outputs))
        and kind_of(collective.reduce_op) != KIND.PREMUL_SUM
    )


@dataclass(frozen=True, kw_only=True)
class FlatCommunication:
    """One gloo communication of a collective. A collective with several tensors has several."""

    shape: Shape
    index: int
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, torch.Tensor], None]
    """Copies this rank's own data into the buffers ``given`` and ``held``."""
    given_numel: int
    """Elements of ``given``; 0: messages are sent from ``held``."""
    held_numel: int
    targets: Sequence[tuple[torch.Tensor, int]]
    """Outputs, each with its offset in ``held``."""

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers ``given`` and ``held``, filled with this rank's own data."""
        held = _room(self.held_numel, self.dtype)
        given = _room(self.given_numel, self.dtype) if self.given_numel else held
        self.fill(given, held)
        return given, held

    def write(self, held: torch.Tensor) -> None:
        """Copy received data from ``held`` to the program's outputs."""
        for output, start in self.targets:
            output.copy_(held[start : start + output.numel()].view(output.shape))


def flat_communications(collective: Collective, algorithm: Algorithm) -> list[FlatCommunication]:
    """Split ``collective`` into the communications that gloo makes, in order."""
    op = collective.op
    if op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE, CollectiveOp.BROADCAST):
        return [_in_place(collective, i, algorithm) for i in range(len(collective.outputs))]
    if op is CollectiveOp.REDUCE_SCATTER:
        return [_reduce_scatter(collective, i, algorithm) for i in range(len(collective.outputs))]
    if op is CollectiveOp.ALL_GATHER:
        return [_all_gather(collective, i) for i in range(len(collective.inputs))]
    if op is CollectiveOp.ALL_TO_ALL:
        return [_all_to_all(collective)]
    if op in (CollectiveOp.GATHER, CollectiveOp.SCATTER):
        return [_rooted(collective)]
    return [_message(collective, i) for i in range(len(collective.inputs or collective.outputs))]


def _shape(collective: Collective, numel: int, algorithm: Algorithm = Algorithm.RING) -> Shape:
    return Shape(
        op=collective.op,
        size=collective.group.size,
        numel=numel,
        root=collective.root,
        algorithm=algorithm,
    )


def _in_place(collective: Collective, i: int, algorithm: Algorithm) -> FlatCommunication:
    tensor = collective.outputs[i]
    is_read = collective.op is not CollectiveOp.REDUCE or collective.root == (
        collective.group.group_rank
    )
    return FlatCommunication(
        shape=_shape(collective, tensor.numel(), algorithm),
        index=i,
        dtype=tensor.dtype,
        fill=lambda given, held: _put(held, [tensor]),
        given_numel=0,
        held_numel=tensor.numel(),
        targets=[(tensor, 0)] if is_read else [],
    )


def _reduce_scatter(collective: Collective, i: int, algorithm: Algorithm) -> FlatCommunication:
    """Reduce the whole buffer, as gloo does. The member keeps its part of the result."""
    size, output = collective.group.size, collective.outputs[i]
    is_flat = len(collective.inputs) == len(collective.outputs)
    sources = collective.inputs[i : i + 1]
    if not is_flat:
        sources = collective.inputs[i * size : (i + 1) * size]
    numel = sum(t.numel() for t in sources)
    start = collective.group.group_rank * output.numel()
    if not is_flat:
        start = sum(t.numel() for t in sources[: collective.group.group_rank])
    return FlatCommunication(
        shape=_shape(collective, numel, algorithm),
        index=i,
        dtype=output.dtype,
        fill=lambda given, held: _put(held, sources),
        given_numel=0,
        held_numel=numel,
        targets=[(output, start)],
    )


def _all_gather(collective: Collective, i: int) -> FlatCommunication:
    size, mine, source = collective.group.size, collective.group.group_rank, collective.inputs[i]
    n = source.numel()
    is_flat = len(collective.inputs) == len(collective.outputs)
    outputs = collective.outputs[i : i + 1]
    if not is_flat:
        outputs = collective.outputs[i * size : (i + 1) * size]
    return FlatCommunication(
        shape=_shape(collective, size * n),
        index=i,
        dtype=source.dtype,
        fill=lambda given, held: _put(held[mine * n : (mine + 1) * n], [source]),
        given_numel=0,
        held_numel=size * n,
        targets=[(output, k * n) for k, output in enumerate(outputs)],
    )


def _all_to_all(collective: Collective) -> FlatCommunication:
    size, mine = collective.group.size, collective.group.group_rank
    sent = _lengths(collective.inputs, collective.input_splits, size)
    got = _lengths(collective.outputs, collective.output_splits, size)
    shape = Shape(op=collective.op, size=size, numel=sum(got), send_splits=sent, receive_splits=got)

    def fill(given: torch.Tensor, held: torch.Tensor) -> None:
        _put(given, collective.inputs)
        own, room = sum(sent[:mine]), sum(got[:mine])
        held[room : room + got[mine]] = given[own : own + sent[mine]]

    starts = [0, *accumulate(t.numel() for t in collective.outputs)]
    return FlatCommunication(
        shape=shape,
        index=0,
        dtype=(collective.inputs or collective.outputs)[0].dtype,
        fill=fill,
        # One element more, because 0 would mean that there is no such buffer.
        given_numel=sum(sent) + 1,
        held_numel=sum(got),
        targets=list(zip(collective.outputs, starts, strict=False)),
    )


def _lengths(tensors: Sequence[torch.Tensor], splits: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the number of elements for each member."""
    if splits:
        width = prod(tensors[0].shape[1:])
        return tuple(n * width for n in splits)
    if len(tensors) == 1:
        return (tensors[0].numel() // size,) * size
    return tuple(t.numel() for t in split_rows(tensors, splits, size))


def _rooted(collective: Collective) -> FlatCommunication:
    """Flatten a gather or scatter: the root has a list of tensors, other members have one."""
    size, mine = collective.group.size, collective.group.group_rank
    is_root, is_gather = mine == collective.root, collective.op is CollectiveOp.GATHER
    own = collective.inputs[0] if is_gather else collective.outputs[0]
    n = own.numel()
    splits = (n,) * size
    shape = Shape(
        op=collective.op,
        size=size,
        numel=n,
        root=collective.root,
        send_splits=splits if is_root and not is_gather else (),
        receive_splits=splits if is_root and is_gather else (),
    )

    def fill(given: torch.Tensor, held: torch.Tensor) -> None:
        if is_gather:
            _put(held[mine * n : (mine + 1) * n] if is_root else held, [own])
        elif is_root:
            _put(given, collective.inputs)
            _put(held, [collective.inputs[mine]])

    return FlatCommunication(
        shape=shape,
        index=0,
        dtype=own.dtype,
        fill=fill,
        given_numel=size * n + 1 if is_root and not is_gather else 0,
        held_numel=size * n if is_root and is_gather else n,
        targets=[(output, k * n) for k, output in enumerate(collective.outputs)],
    )


def _message(collective: Collective, i: int) -> FlatCommunication:
    tensor = (collective.inputs or collective.outputs)[i]
    return FlatCommunication(
        shape=_shape(collective, tensor.numel()),
        index=i,
        dtype=tensor.dtype,
        fill=lambda given, held: _put(held, [tensor]) if collective.inputs else None,
        given_numel=0,
        held_numel=tensor.numel(),
        targets=[(output, 0) for output in collective.outputs[i : i + 1]],
    )


def _room(numel: int, dtype: torch.dtype) -> torch.Tensor:
    raw = np.empty(numel * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def _put(room: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors one after another into ``room``."""
    ends = [0, *accumulate(t.numel() for t in tensors)]
    for tensor, (start, stop) in zip(tensors, pairwise(ends), strict=True):
        room[start:stop].view(tensor.shape).copy_(tensor)
