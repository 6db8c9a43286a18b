"""Combines the real contributions of several live ranks with those of virtual peers.

A virtual peer contributes what one of the live members contributes (*mirror*). Virtual members are
assigned to the live ones in turn, so live member ``l`` counts ``weights(...)[l]`` times. With a
single live member this is what :class:`prismscale.payload.mirror.MirrorPayload` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import (
    KIND,
    accumulate,
    chunk,
    divide,
    factor_of,
    kind_of,
    repeat_copies,
    scale,
    signed,
)

Contributions = Mapping[int, Sequence[torch.Tensor]]
"""Each live member's inputs by group rank; for an all_to_all, only its rows for this rank."""


def stand_in(group_rank: int, live: Sequence[int]) -> int:
    """Return the live member whose contribution ``group_rank`` repeats."""
    return group_rank if group_rank in live else live[group_rank % len(live)]


def weights(size: int, live: Sequence[int]) -> dict[int, int]:
    """Return how many members each live member stands for, itself included."""
    out = dict.fromkeys(live, 0)
    for group_rank in range(size):
        out[stand_in(group_rank, live)] += 1
    return out


def combine(collective: Collective, contributions: Contributions) -> None:
    """Write the result of all members' contributions into ``collective.outputs``."""
    write_parts(collective, {m: part_of(collective, given) for m, given in contributions.items()})


def part_of(collective: Collective, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the part of a member's contribution ``given`` that enters this rank's outputs."""
    if collective.op is CollectiveOp.REDUCE_SCATTER:
        return [_part(given, i, collective) for i in range(len(collective.outputs))]
    if collective.op is CollectiveOp.SCATTER and given:
        mine = collective.group.group_rank
        return given[mine : mine + 1]
    return given


def own_part(collective: Collective) -> Sequence[torch.Tensor]:
    """Return what this rank contributes to its own outputs."""
    if collective.op is CollectiveOp.ALL_TO_ALL:
        return [rows_for(collective, collective.group.group_rank)]
    own = collective.inputs or collective.outputs
    return part_of(collective, [t.detach().reshape(-1) for t in own])


def write_parts(collective: Collective, parts: Contributions) -> None:
    """Write ``collective.outputs`` from the ``parts`` that members contribute to them."""
    op, group = collective.op, collective.group
    live = sorted(parts)
    if op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER) or (
        op is CollectiveOp.REDUCE and collective.root == group.group_rank
    ):
        for i, output in enumerate(collective.outputs):
            part = {m: parts[m][i] for m in live}
            _reduce_into(output, part, group.group_rank, collective.reduce_op, group.size)
    elif op in (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER):
        _gather(collective, parts, live)
    elif op is CollectiveOp.ALL_TO_ALL:
        _all_to_all(collective, parts, live)
    elif op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.RECV):
        sender = collective.root
        if op is CollectiveOp.BROADCAST:
            sender = stand_in(sender, live)
        values = parts.get(sender)
        if values is not None:
            for output, value in zip(collective.outputs, values, strict=True):
                output.copy_(value.view(output.shape))


def _reduce_into(
    output: torch.Tensor,
    parts: Mapping[int, torch.Tensor],
    own: int,
    reduce_op: ReduceOp | None,
    size: int,
) -> None:
    """Reduce ``parts`` into ``output`` without allocating: the program's memory peak is measured.

    The own contribution comes first, because it may be ``output`` itself.
    """
    kind, share = kind_of(reduce_op), weights(size, sorted(parts))
    output.copy_(parts[own].view(output.shape))
    total = signed(output)
    if kind == KIND.PREMUL_SUM:
        kind, factor = KIND.SUM, factor_of(reduce_op)
    else:
        factor = None
    repeat_copies(total, kind, share[own])
    for member, part in parts.items():
        if member != own:
            accumulate(total, signed(part.view(output.shape)), kind, share[member])
    if factor is not None:
        scale(total, factor)
    elif kind == KIND.AVG:
        divide(output, size)


def _part(inputs: Sequence[torch.Tensor], i: int, collective: Collective) -> torch.Tensor:
    """This rank's part of a member's i-th reduce_scatter input: flat, or a list of K."""
    size, mine = collective.group.size, collective.group.group_rank
    if len(inputs) == len(collective.outputs):
        return chunk(inputs[i], mine, collective.outputs[i])
    return inputs[i * size + mine]


def _gather(collective: Collective, contributions: Contributions, live: Sequence[int]) -> None:
    size, outputs = collective.group.size, collective.outputs
    if not outputs:
        return
    n = len(contributions[live[0]])
    for i in range(n):
        slots: Sequence[torch.Tensor]
        if len(outputs) == n:
            slots = outputs[i].view(-1).view(size, -1).unbind(0)
        else:
            slots = outputs[i * size : (i + 1) * size]
        for member, slot in enumerate(slots):
            fit(contributions[stand_in(member, live)][i], slot)


def rows_for(collective: Collective, member: int) -> torch.Tensor:
    """Return what this rank sends to one member of an all_to_all, flat."""
    rows = split_rows(collective.inputs, collective.input_splits, collective.group.size)
    return rows[member].detach().reshape(-1)


def _all_to_all(collective: Collective, contributions: Contributions, live: Sequence[int]) -> None:
    outputs = split_rows(collective.outputs, collective.output_splits, collective.group.size)
    for member, target in enumerate(outputs):
        (rows,) = contributions[stand_in(member, live)]
        fit(rows, target)


def fit(source: torch.Tensor, output: torch.Tensor) -> None:
    """Copy ``source`` to ``output``, cut or filled with zeros where the member's size differs."""
    if source.numel() == output.numel():
        output.copy_(source.reshape(output.shape))
        return
    fitted = output.new_zeros(output.numel())
    n_common = min(source.numel(), output.numel())
    fitted[:n_common].copy_(source.reshape(-1)[:n_common])
    output.copy_(fitted.view(output.shape))


def split_rows(
    tensors: Sequence[torch.Tensor], splits: Sequence[int], size: int
) -> Sequence[torch.Tensor]:
    """Return each member's part in an all_to_all of one flat tensor, or of one for each member."""
    if len(tensors) == size and not (size == 1 and splits):
        return tensors
    flat = tensors[0]
    if splits:
        return flat.split(list(splits))
    is_even = flat.dim() > 0 and flat.shape[0] % size == 0
    return flat.chunk(size) if is_even else flat.view(size, -1).unbind(0)
