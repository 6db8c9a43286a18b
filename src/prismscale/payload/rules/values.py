"""Turns what a rule says about absent peers into the outputs of a communication on this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from prismscale.emulation.hook import Collective
from prismscale.errors import UsageError, shown
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
        # On the host, whatever the program's default device is.
        room = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
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
    own: list[torch.Tensor] = []
    if collective.op not in FROM_ONE and any(is_own(value) for value in said.values()):
        # One copy for all members, because this rank's contribution may also be its output.
        # Each member counts once, so no reduction overwrites it.
        own = [t.clone() for t in own_part(collective)]
    for member, value in said.items():
        is_copied = own and is_own(value)
        parts[member] = own if is_copied else list(_part_said(value, collective, member, rule))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        write_parts(collective, parts)


def is_own(value: Any) -> bool:
    """Return whether a rule says that a peer contributes what this rank does.

    The text may come from a file, so it need not be the same object.
    """
    return isinstance(value, str) and value == OWN


def _part_said(value: Any, collective: Collective, member: int, rule: Rule) -> Tensors:
    room = _room(collective, member)
    if is_own(value):
        return room
    if isinstance(value, bool | int | float):
        return [_numbers(value, t.dtype, rule, collective.op).expand(t.numel()) for t in room]
    given = _tensors(value, rule, collective.op, room[0].dtype)
    sizes, wanted = [t.numel() for t in given], [t.numel() for t in room]
    if sizes != wanted:
        raise UsageError(
            f"rule {rule} gives {sizes} elements for {collective.op.spelling}, where a peer "
            f"contributes {wanted}"
        )
    return [t.detach().reshape(-1).to("cpu", r.dtype) for t, r in zip(given, room, strict=True)]


def _tensors(value: Any, rule: Rule, op: CollectiveOp, dtype: torch.dtype) -> Tensors:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple) and value:
        if all(isinstance(t, torch.Tensor) for t in value):
            return value
        if all(isinstance(x, bool | int | float) for x in value):
            return [_numbers(value, dtype, rule, op)]
    raise UsageError(
        f"rule {rule} gives {type(value).__name__} for {op.spelling}; it may give a number, a list "
        f"of numbers, a tensor, a list of tensors, '{OWN}' (what this rank contributes), or None"
    )


def _numbers(value: Any, dtype: torch.dtype, rule: Rule, op: CollectiveOp) -> torch.Tensor:
    """Return a number, or a list of them, as a tensor of ``dtype``.

    Raises:
        UsageError: ``dtype`` cannot hold one of them.
    """
    is_list = isinstance(value, list | tuple)
    numbers = list(value) if is_list else [value]
    for number in numbers:
        if (allowed := _allowed(number, dtype)) is not None:
            raise UsageError(
                f"rule {rule} gives {shown(number)} for {op.spelling} of "
                f"{str(dtype).removeprefix('torch.')}; give {allowed}, or narrow the rule to other "
                "tensors (dtype)"
            )
    # torch does not take every number for every dtype: no 2.0 for unsigned integers.
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    plain = [int(number) if is_whole else float(number) for number in numbers]
    return torch.tensor(plain if is_list else plain[0], dtype=dtype, device="cpu")


def _allowed(number: float, dtype: torch.dtype) -> str | None:
    """Return which numbers ``dtype`` holds, if ``number`` is none of them; else None."""
    if dtype is torch.bool:
        return None if number in (0, 1) else "0 or 1"
    if not (dtype.is_floating_point or dtype.is_complex):
        told = torch.iinfo(dtype)
        is_whole = isinstance(number, int) or number.is_integer()
        if is_whole and told.min <= number <= told.max:
            return None
        return f"a whole number from {told.min} to {told.max}"
    most = torch.finfo(dtype).max
    if abs(number) <= most:
        return None
    if not isinstance(number, int) and not math.isfinite(number):
        made = torch.tensor(number, dtype=dtype, device="cpu").to(torch.complex128).real
        if math.isnan(number) == bool(made.isnan()) and math.isinf(number) == bool(made.isinf()):
            return None
    return f"a number from {-most:g} to {most:g}"


def _room(collective: Collective, member: int) -> Tensors:
    """Return flat tensors as large as what ``member`` contributes to this rank's outputs."""
    outputs, inputs = collective.outputs, collective.inputs
    size = collective.group.size
    if collective.op in (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER):
        if len(outputs) == len(inputs):
            return [t.detach().reshape(-1) for t in inputs]
        # A list with a tensor for each member, which may differ in size.
        return [outputs[i * size + member].detach().reshape(-1) for i in range(len(inputs))]
    if collective.op is CollectiveOp.ALL_TO_ALL:
        if len(outputs) == size:
            return [outputs[member].reshape(-1)]
        rows = collective.output_splits or (outputs[0].shape[0] // size,) * size
        return [outputs[0].split(list(rows))[member].reshape(-1)]
    return [t.detach().reshape(-1) for t in outputs]
