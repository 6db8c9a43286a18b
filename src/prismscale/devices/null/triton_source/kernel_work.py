"""What one launch of a Triton kernel does: its products, and the bytes that it moves.

Some programs of the grid are followed through the kernel's Python source, with shapes in place of
values (:mod:`~prismscale.devices.null.triton_source.blocks`); the others are like these. Masks are
not looked at: a block counts whole, and a tensor's bytes once at most in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from prismscale.cost.kernel_tiles import TILES
from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.launches import Cost, gemm, memory
from prismscale.devices.null.triton_source.blocks import Pointer
from prismscale.devices.null.triton_source.functions import as_value, call
from prismscale.devices.null.triton_source.language import Descriptor
from prismscale.devices.null.triton_source.tally import (
    ELSEWHERE,
    Tally,
    counted_in,
    triton_language,
)

MOST_PROGRAMS = 5
"""Of a grid that are followed, evenly along its diagonal: what they loop over may grow along one
axis, as under a causal mask."""
MOST_REMEMBERED = 4096
"""Launches whose work is kept."""
MOST_BYTES = 2**62
"""Of memory that is known by its address alone."""
SMALLEST_TILE = min(map(min, TILES))
"""Along either side of a product's; smaller ones share one."""
_KINDS = ("sort", "scan", "index", "reduction")
"""The first that a kernel has among its operations is its kind."""
_TRITON_NAMES = {
    torch.bool: "int1",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e4m3fnuz: "float8e4b8",
    torch.float8_e5m2: "float8e5",
    torch.float8_e5m2fnuz: "float8e5b16",
}
"""Of element types; the others have torch's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Of one launch."""

    cost: Cost
    reads: tuple[int, ...]
    """Places of tensors among the launch's."""
    writes: tuple[int, ...]


_remembered: dict[Any, Work] = {}


def work_of(kernel: Any, arguments: Mapping[str, Any], grid: Sequence[int]) -> Work | None:
    """What ``kernel`` does; None where its source cannot be followed.

    Args:
        kernel: what ``triton.jit`` made.
        arguments: of the launch, by name, with those that have a default.
        grid: programs along each axis.
    """
    tensors = tensors_of(arguments.values())
    try:
        key = (kernel, tuple(grid), *_key(arguments.values()))
        if key in _remembered:
            return _remembered[key]
        tally, programs = _followed(kernel, arguments, tensors, tuple(grid))
        found = _work(tally, tensors, programs, prod(grid))
    except Exception:
        # The kernel's own Python, on what it was not written for, may raise anything.
        return None
    if not tally.reads_values:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()  # a seed among the arguments makes each launch another
        _remembered[key] = found
    return found


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The launch's tensors on the device, those behind descriptors among them."""
    found = (getattr(value, "base", value) for value in _flat(values))
    return [value for value in found if isinstance(value, Tensor) and value.is_cuda]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _key(values: Iterable[Any]) -> Iterator[Any]:
    """Equal for launches that do the same."""
    for value in _flat(values):
        tensor = getattr(value, "base", value)
        if isinstance(tensor, Tensor):
            yield tensor.dtype, tensor.nbytes, tuple(getattr(value, "block_shape", ()))
        else:
            yield type(value), value


def _followed(
    kernel: Any, arguments: Mapping[str, Any], tensors: Sequence[Tensor], grid: tuple[int, ...]
) -> tuple[Tally, int]:
    """What some programs do together, and how many these are."""

    def held(tensor: int, at: int) -> int | None:
        return _held(tensors[tensor], at)

    grid = (*grid, 1, 1)[:3]
    tally, programs = Tally(grid=grid, held=held), _programs(grid)
    for program in programs:
        tally.program = program
        with counted_in(tally):
            places = iter(range(len(tensors)))
            values = {name: _value(value, places) for name, value in arguments.items()}
            call(kernel, (), values)
    return tally, len(programs)


def _programs(grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    if prod(grid) <= MOST_PROGRAMS:
        return list(product(*map(range, grid)))
    steps = [(step + 0.5) / MOST_PROGRAMS for step in range(MOST_PROGRAMS)]
    return [tuple(int(step * size) for size in grid) for step in steps]


def _held(tensor: Tensor, at: int) -> int | None:
    """What a tensor of integers holds, where the null device knows."""
    known = value_policy.known(tensor)
    if known is None or not tensor.is_contiguous() or not 0 <= at < known.numel():
        return None
    return int(known.flatten()[at])


def _value(value: Any, places: Iterator[int]) -> Any:
    """What the kernel gets in place of an argument."""
    if type(value) is tuple:
        return tuple(_value(part, places) for part in value)
    tensor = getattr(value, "base", value)
    if not isinstance(tensor, Tensor):
        return as_value(value)
    if not tensor.is_cuda:
        raise ValueError("a tensor of the host")
    pointer = Pointer((), _pointer_type(tensor.dtype), tensor=next(places), at=0)
    return pointer if tensor is value else Descriptor(pointer, value.block_shape)


def _pointer_type(dtype: torch.dtype) -> Any:
    name = _TRITON_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    language = triton_language()
    return language.pointer_type(getattr(language, name))


def _work(tally: Tally, tensors: Sequence[Tensor], followed: int, programs: int) -> Work:
    reads = tuple(sorted(set(tally.read_bytes) - {ELSEWHERE}))
    writes = tuple(sorted(set(tally.written_bytes) - {ELSEWHERE}))
    if tally.products:
        return Work(cost=_products(tally, followed, programs), reads=reads, writes=writes)
    held = {place: tensor.nbytes for place, tensor in enumerate(tensors)}
    moved = sum(
        min(held.get(place, MOST_BYTES), n_bytes * programs // followed)
        for bytes_of in (tally.read_bytes, tally.written_bytes)
        for place, n_bytes in bytes_of.items()
    )
    kind = next((kind for kind in _KINDS if kind in tally.kinds), "pointwise")
    return Work(cost=memory(kind, n_bytes=moved), reads=reads, writes=writes)


def _products(tally: Tally, followed: int, programs: int) -> Cost:
    """One product for each size of tile, over all programs."""
    bits = max(bits for _, _, bits in tally.products)
    found = []
    for (rows, columns, _), inner in sorted(tally.products.items()):
        m, n = max(rows, SMALLEST_TILE), max(columns, SMALLEST_TILE)
        tiles = programs * rows * columns / (m * n)
        # As many multiplications, in whole tiles.
        batch = ceil(tiles)
        found.append((batch, m, n, max(1, round(inner / followed * tiles / batch))))
    return replace(gemm(*found, bits=bits), launches=1)
