"""Who holds the memory of a null device that ran out of it.

The allocator model knows which op made a block. The program's own objects say what it is: a model's
parameters and their gradients by name, an optimizer's state. They are looked for only then, among
all objects that Python knows.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from prismscale.devices.null import memory_stats
from prismscale.devices.null.memory_stats import LiveBlock

MOST_BLOCKS = 6
"""Kinds of further allocations that are listed."""


class Owner(NamedTuple):
    """What a block is to the program."""

    kind: str
    name: str


def occupants(library: ctypes.PyDLL, device: int) -> list[str]:
    """Lines for people: what occupied ``device`` when it last ran out, the program's own first."""
    owners = _owners()
    owned: dict[str, list[tuple[int, str]]] = {}
    others: Counter[tuple[str, int]] = Counter()
    for block in memory_stats.blocks_at_out_of_memory(library, device):
        owner = owners.get(block.address)
        if owner is None:
            others[_made_by(block), block.size_bytes] += 1
        else:
            owned.setdefault(owner.kind, []).append((block.size_bytes, owner.name))
    return [*_owned_lines(owned), *_other_lines(others)]


def _owned_lines(owned: dict[str, list[tuple[int, str]]]) -> Iterator[str]:
    for kind, blocks in owned.items():
        size, name = max(blocks)
        total = sum(size for size, _ in blocks)
        count = f"{len(blocks):,} of them" if len(blocks) > 1 else "one"
        yield f"{_mib(total)}  {kind}: {count}, the largest {_mib(size).strip()} of {name}"


def _other_lines(others: Counter[tuple[str, int]]) -> Iterator[str]:
    ranked = sorted(others.items(), key=lambda item: -item[0][1] * item[1])
    for (made_by, size), count in ranked[:MOST_BLOCKS]:
        yield f"{_mib(count * size)}  {count:,} × {_mib(size).strip()} made by {made_by}"
    rest = sum(size * count for (_, size), count in ranked[MOST_BLOCKS:])
    if rest:
        yield f"{_mib(rest)}  {sum(n for _, n in ranked[MOST_BLOCKS:]):,} smaller ones"


def _made_by(block: LiveBlock) -> str:
    shape = block.outputs.partition(";")[0]
    return f"{block.made_by} → {shape}" if shape else block.made_by


def _owners() -> dict[int, Owner]:
    """By address of the storage."""
    # By type: asking a stranger's object for its class may run the stranger's code.
    objects = [
        o for o in gc.get_objects() if issubclass(type(o), (nn.Module, torch.optim.Optimizer))
    ]
    named: dict[torch.Tensor, str] = {}
    buffers: dict[torch.Tensor, str] = {}
    for module in (o for o in objects if isinstance(o, nn.Module)):
        _keep_longest(named, module.named_parameters())
        _keep_longest(buffers, module.named_buffers())
    found: dict[int, Owner] = {}
    for tensor, name in named.items():
        _add(found, tensor, Owner("parameters", name))
        _add(found, tensor.grad, Owner("gradients", name))
    for optimizer in (o for o in objects if isinstance(o, torch.optim.Optimizer)):
        for tensor, state in optimizer.state.items():
            for part, value in state.items():
                name = f"{part} of {named.get(tensor, 'a tensor')}"
                _add(found, value, Owner("optimizer state", name))
    for tensor, name in buffers.items():
        _add(found, tensor, Owner("buffers", name))
    return found


def _keep_longest(
    names: dict[torch.Tensor, str], found: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Every module names its own; the outermost gives the whole name."""
    for name, tensor in found:
        names[tensor] = max(names.get(tensor, ""), name, key=len)


def _add(found: dict[int, Owner], tensor: Any, owner: Owner) -> None:
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(local, torch.Tensor) and local.is_cuda:
        found.setdefault(local.untyped_storage().data_ptr(), owner)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:10,.1f} MiB"
