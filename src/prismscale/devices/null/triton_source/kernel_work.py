"""Work of one launch of a Triton kernel: its matrix products and the bytes that it moves.

Some programs of the grid are traced through the kernel's Python source, with shapes in place of
values (:mod:`~prismscale.devices.null.triton_source.blocks`). The others are assumed to be like
these. Masks are ignored: a block always counts in full, but a tensor's bytes count at most once in
each direction.
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
"""Most programs of a grid that are traced. They lie evenly along its diagonal, because loops may
grow along one axis, as under a causal mask."""
MOST_REMEMBERED = 4096
"""Most launches whose work is cached."""
MOST_BYTES = 2**62
"""Limit on the bytes of memory of which only the address is known."""
SMALLEST_TILE = min(map(min, TILES))
"""Smallest extent of a product's tile on either side. Several smaller tiles count as one."""
_KINDS = {"index": {"index"}, "reduction": {"sort", "scan", "reduction"}}
"""Kinds of kernels by priority, with the operations that make a kernel one. Sorts and scans are of
what a program holds: each of their loads and stores was counted, unlike the passes of ATen's."""
_TRITON_NAMES = {
    torch.bool: "int1",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e4m3fnuz: "float8e4b8",
    torch.float8_e5m2: "float8e5",
    torch.float8_e5m2fnuz: "float8e5b16",
}
"""Triton's names of element types that differ from torch's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one launch."""

    cost: Cost
    reads: tuple[int, ...]
    """Tensors that are read, by their places among the launch's tensors."""
    writes: tuple[int, ...]


_remembered: dict[Any, Work] = {}


def work_of(kernel: Any, arguments: Mapping[str, Any], grid: Sequence[int]) -> Work | None:
    """Return the work of a launch of ``kernel``; None if its source cannot be traced.

    Args:
        kernel: the object that ``triton.jit`` made.
        arguments: all arguments of the launch by name, including defaults.
        grid: number of programs along each axis.
    """
    tensors = tensors_of(arguments.values())
    try:
        key = (kernel, tuple(grid), *_key(arguments.values()))
        if key in _remembered:
            return _remembered[key]
        tally, programs = _followed(kernel, arguments, tensors, tuple(grid))
        found = _work(tally, tensors, programs, prod(grid))
    except Exception:
        # The kernel's Python runs on values for which it was not written, and may raise anything.
        return None
    if not tally.reads_values:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()  # a seed among the arguments makes each launch differ
        _remembered[key] = found
    return found


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the launch's tensors on the device, including those behind tensor descriptors."""
    found = (getattr(value, "base", value) for value in _flat(values))
    return [value for value in found if isinstance(value, Tensor) and value.is_cuda]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _key(values: Iterable[Any]) -> Iterator[Any]:
    """Yield a cache key, which is equal for launches that do the same work."""
    for value in _flat(values):
        tensor = getattr(value, "base", value)
        if isinstance(tensor, Tensor):
            yield tensor.dtype, tensor.nbytes, tuple(getattr(value, "block_shape", ()))
        else:
            yield type(value), value


def _followed(
    kernel: Any, arguments: Mapping[str, Any], tensors: Sequence[Tensor], grid: tuple[int, ...]
) -> tuple[Tally, int]:
    """Trace some programs; returns what they do together, and the number of these programs."""

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
    """Return one element of a tensor of integers, if the null device knows it."""
    known = value_policy.known(tensor)
    if known is None or not tensor.is_contiguous() or not 0 <= at < known.numel():
        return None
    return int(known.flatten()[at])


def _value(value: Any, places: Iterator[int]) -> Any:
    """Return the value that the traced kernel gets in place of an argument."""
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
    kind = next((kind for kind, of in _KINDS.items() if tally.kinds & of), "pointwise")
    return Work(cost=memory(kind, n_bytes=moved), reads=reads, writes=writes)


def _products(tally: Tally, followed: int, programs: int) -> Cost:
    """Return one product for each tile size, summed over all programs."""
    bits = max(bits for _, _, bits in tally.products)
    found = []
    for (rows, columns, _), inner in sorted(tally.products.items()):
        m, n = max(rows, SMALLEST_TILE), max(columns, SMALLEST_TILE)
        tiles = programs * rows * columns / (m * n)
        # The number of multiplications stays the same, but in whole tiles.
        batch = ceil(tiles)
        found.append((batch, m, n, max(1, round(inner / followed * tiles / batch))))
    return replace(gemm(*found, bits=bits), launches=1)
