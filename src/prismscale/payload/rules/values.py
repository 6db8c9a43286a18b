"""Turns what a rule says about absent peers into the outputs of a communication on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from prismscale.emulation.hook import Collective
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.combine import Contributions, own_part, write_parts
from prismscale.payload.mirror import FROM_ONE
from prismscale.payload.rules.rule import Rule

OWN = "own"
"""A rule's answer for a peer that contributes the same as this rank."""
ValueOf = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the values of a tensor, or None if they are unknown."""
Tensors = Sequence[torch.Tensor]


def in_host_memory(collective: Collective, value_of: ValueOf) -> Collective | None:
    """Return the communication on host tensors; None if this rank's contribution is unknown."""
    if all(t.device.type == "cpu" for t in (*collective.inputs, *collective.outputs)):
        return collective
    values: dict[int, torch.Tensor | None] = {}
    for tensor in (*collective.inputs, *collective.outputs):
        is_given = collective.op not in FROM_ONE and any(tensor is t for t in collective.inputs)
        room = torch.zeros(tensor.shape, dtype=tensor.dtype)
        values[id(tensor)] = value_of(tensor) if is_given else room
    known = {key: value for key, value in values.items() if value is not None}
    if len(known) < len(values):
        return None
    return replace(
        collective,
        inputs=tuple(known[id(t)].cpu() for t in collective.inputs),
        outputs=tuple(known[id(t)].cpu() for t in collective.outputs),
    )


def write_said(
    collective: Collective, rule: Rule, said: dict[int, Any], here: Contributions
) -> None:
    """Define the outputs, all in host memory, from what ``rule`` said about absent members.

    Raises:
        UsageError: what the rule said does not fit the tensors.
    """
    parts = {member: [t.cpu() for t in given] for member, given in here.items()}
    if collective.op not in FROM_ONE:
        parts[collective.group.group_rank] = list(own_part(collective))
    for member, value in said.items():
        parts[member] = list(_part_said(value, collective, member, rule))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        write_parts(collective, parts)


def _part_said(value: Any, collective: Collective, member: int, rule: Rule) -> Tensors:
    room = _room(collective, member)
    if isinstance(value, str) and value == OWN:
        if collective.op in FROM_ONE:
            return room
        # A copy, because this rank's contribution may also be its output.
        return [t.clone() for t in own_part(collective)]
    if isinstance(value, bool | int | float):
        return [torch.full((), value, dtype=t.dtype).expand(t.numel()) for t in room]
    given = _tensors(value, rule, collective.op)
    sizes, wanted = [t.numel() for t in given], [t.numel() for t in room]
    if sizes != wanted:
        raise UsageError(
            f"rule {rule} gives {sizes} elements for {collective.op.spelling}, where a peer "
            f"contributes {wanted}"
        )
    return [t.detach().reshape(-1).to("cpu", r.dtype) for t, r in zip(given, room, strict=True)]


def _tensors(value: Any, rule: Rule, op: CollectiveOp) -> Tensors:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple) and value:
        if all(isinstance(t, torch.Tensor) for t in value):
            return value
        if all(isinstance(x, bool | int | float) for x in value):
            return [torch.tensor(value)]
    raise UsageError(
        f"rule {rule} gives {type(value).__name__} for {op.spelling}; it may give a number, a list "
        f"of numbers, a tensor, a list of tensors, '{OWN}' (what this rank contributes), or None"
    )


def _room(collective: Collective, member: int) -> Tensors:
    """Return flat tensors as large as what ``member`` contributes to this rank's outputs."""
    if collective.op in (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER):
        return [t.detach().reshape(-1) for t in collective.inputs]
    outputs = collective.outputs
    if collective.op is CollectiveOp.ALL_TO_ALL:
        size = collective.group.size
        if len(outputs) == size:
            return [outputs[member].reshape(-1)]
        rows = collective.output_splits or (outputs[0].shape[0] // size,) * size
        return [outputs[0].split(list(rows))[member].reshape(-1)]
    return [t.detach().reshape(-1) for t in outputs]
