"""Triton's language for tracing a kernel: it works on shapes in place of values, and counts work.

Functions that are not defined here are treated as elementwise. Source: ``triton/language`` of
Triton 3.6 to 3.8.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from prismscale.cost.kernel_gemm import FLOAT_BITS, TF32_BITS
from prismscale.devices.null.triton_source.blocks import (
    Block,
    Pointer,
    common_shape,
    joined,
    number,
    shape_of,
)
from prismscale.devices.null.triton_source.tally import (
    ELSEWHERE,
    UnreadableKernelError,
    tally,
    triton_language,
    turns,
)

_EXPONENTIALS = ("exp", "exp2")
_PLAIN: dict[str, Callable[..., float]] = {
    "abs": abs,
    "ceil": math.ceil,
    "exp": math.exp,
    "exp2": math.exp2,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "maximum": max,
    "minimum": min,
    "rsqrt": lambda x: x**-0.5,
    "sqrt": math.sqrt,
}
"""Elementwise functions that can be computed on known numbers."""
_BITS = {"e2m1": 4, "e4m3": 8, "e5m2": 8}
"""Bits of the formats of ``dot_scaled``; the other formats have 16."""
_UNCHANGED = ("multiple_of", "max_contiguous", "max_constancy", "to_tensor", "condition", "flip")
_SILENT = ("static_assert", "static_print", "device_assert", "device_print", "assume")


class Descriptor:
    """A tensor descriptor: a tensor that is loaded and stored block by block."""

    def __init__(self, pointer: Pointer, block_shape: Sequence[int]) -> None:
        self.pointer = pointer
        self.block_shape = tuple(block_shape)
        self.dtype = pointer.dtype.element_ty

    def load(self, offsets: Any) -> Block:
        """Load the block at ``offsets``."""
        return LANGUAGE.load(self.pointer.like(self.block_shape))

    def store(self, offsets: Any, value: Any) -> None:
        """Store the block at ``offsets``."""
        LANGUAGE.store(self.pointer.like(self.block_shape), value)

    def gather(self, x_offsets: Block, y_offset: Any) -> Block:
        """Load rows of the tensor."""
        tally().kinds.add("index")
        return LANGUAGE.load(self.pointer.like((*x_offsets.shape, self.block_shape[-1])))

    def scatter(self, value: Any, x_offsets: Block, y_offset: Any) -> None:
        """Store rows of the tensor."""
        tally().kinds.add("index")
        LANGUAGE.store(self.pointer.like(shape_of(value)), value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("atomic_"):
            return self.store
        raise AttributeError(name)


class Language:
    """Stand-in for ``triton.language`` and the modules below it."""

    def __init__(self, module: ModuleType | None = None) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        language = triton_language()
        real = getattr(self._module or language, name, None)
        if isinstance(real, ModuleType):
            return Language(real)
        if isinstance(real, language.dtype) or real is language.pointer_type:
            return real
        if real is language.constexpr:
            return lambda value: value
        if name in _UNCHANGED:
            return lambda value, *_, **__: value
        if name in _SILENT or name.endswith("_barrier"):
            return lambda *_, **__: None
        return lambda *values, **named: elementwise(name, values, named)

    # --- the grid and loops

    def program_id(self, axis: int) -> Any:
        """Return the id of the traced program along an axis."""
        return number(tally().program[axis])

    def num_programs(self, axis: int) -> Any:
        """Return the size of the grid along an axis."""
        return number(tally().grid[axis])

    def range(self, *bounds: Any, **_: Any) -> Iterator[Any]:
        """Loop. A loop whose bounds are values of a tensor cannot be traced."""
        return map(number, turns([operator.index(bound) for bound in bounds]))

    static_range = range

    def cdiv(self, x: Any, div: Any) -> Any:
        """Divide and round up."""
        return (x + div - 1) // div

    def next_power_of_2(self, n: int) -> Any:
        """Return the smallest power of 2 that is at least ``n``."""
        return number(1 << max(0, int(n) - 1).bit_length())

    # --- memory

    def load(self, pointer: Any, *_: Any, **__: Any) -> Any:
        """Load a block of a tensor."""
        if isinstance(pointer, Descriptor):
            return pointer.load(None)
        element, count = pointer.dtype.element_ty, tally()
        _touch(count.read_bytes, pointer, pointer.shape)
        at = pointer.at if isinstance(pointer, Pointer) and not pointer.shape else None
        if at is not None and not element.is_floating():
            count.reads_values = True
            value = count.held(pointer.tensor, at)
            if value is not None:
                return number(value)
        return Block(pointer.shape, element, is_loaded=True)

    def store(self, pointer: Any, value: Any, *_: Any, **__: Any) -> None:
        """Store a block of a tensor."""
        if isinstance(pointer, Descriptor):
            pointer.store(None, value)
            return
        _touch(tally().written_bytes, pointer, common_shape((pointer, value)))

    def _atomic(self, pointer: Any, *values: Any, **_: Any) -> Block:
        self.load(pointer)
        self.store(pointer, values[0])
        return Block(pointer.shape, pointer.dtype.element_ty, is_loaded=True)

    atomic_add = atomic_and = atomic_cas = atomic_max = atomic_min = _atomic
    atomic_or = atomic_xchg = atomic_xor = _atomic

    def make_block_ptr(self, base: Any, **named: Any) -> Pointer:
        """Return the addresses of a block."""
        return _pointer(base).like(named["block_shape"])

    def advance(self, base: Any, offsets: Any) -> Any:
        """Return the same block of addresses, because its place does not matter here."""
        return base

    def make_tensor_descriptor(self, base: Any, shape: Any, strides: Any, block_shape: Any) -> Any:
        """Return a descriptor of a tensor."""
        return Descriptor(_pointer(base), block_shape)

    def load_tensor_descriptor(self, descriptor: Any, offsets: Any) -> Block:
        """Load the descriptor's block at ``offsets``."""
        loaded: Block = descriptor.load(offsets)
        return loaded

    def store_tensor_descriptor(self, descriptor: Any, offsets: Any, value: Any) -> None:
        """Store the descriptor's block at ``offsets``."""
        descriptor.store(offsets, value)

    # --- products

    def dot(self, input: Any, other: Any, acc: Any = None, **named: Any) -> Block:
        """Multiply matrices."""
        shape = (*input.shape[:-1], other.shape[-1])
        bits = min(FLOAT_BITS, input.dtype.primitive_bitwidth)
        # TF32 is Triton's default for 32-bit floats.
        if bits == FLOAT_BITS and named.get("input_precision", "tf32") != "ieee":
            bits = TF32_BITS if named.get("allow_tf32", True) is not False else bits
        tally().product(shape, input.shape[-1], bits)
        return Block(shape, _float32(), is_loaded=True)

    def dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: str, rhs: Any, *more: Any, **named: Any
    ) -> Block:
        """Multiply matrices of floats with scales."""
        rhs_format = named.get("rhs_format", more[1] if len(more) > 1 else lhs_format)
        bits = max(_BITS.get(lhs_format, 16), _BITS.get(rhs_format, 16))
        inner = lhs.shape[-1] * (2 if lhs_format == "e2m1" else 1)
        shape = (*lhs.shape[:-1], rhs.shape[-1])
        tally().product(shape, inner, bits)
        return Block(shape, _float32(), is_loaded=True)

    # --- shapes

    def arange(self, start: int, end: int) -> Block:
        """Return a block of consecutive integers."""
        return Block((end - start,), triton_language().int32)

    def full(self, shape: Any, value: Any, dtype: Any = None, **_: Any) -> Block:
        """Return a block filled with one number."""
        return Block(_sizes(shape), dtype or _float32())

    def zeros(self, shape: Any, dtype: Any = None, **_: Any) -> Block:
        """Return a block of zeros."""
        return Block(_sizes(shape), dtype or _float32())

    def zeros_like(self, input: Any) -> Any:
        """Return zeros with the shape and type of ``input``."""
        return input.like(input.shape) if isinstance(input, Block) else input

    def to(self, input: Any, dtype: Any, **_: Any) -> Any:
        """Convert to an element type."""
        if isinstance(input, Pointer):
            return input
        return Block(input.shape, dtype, is_loaded=input.is_loaded, guess=input.guess)

    def cast(self, input: Any, dtype: Any, **_: Any) -> Any:
        """Convert to an element type."""
        return input.to(dtype)

    def reshape(self, input: Any, *shape: Any, **_: Any) -> Any:
        """Return the same elements in another shape."""
        return input.like(_sizes(shape[0] if len(shape) == 1 else shape))

    view = reshape

    def broadcast_to(self, input: Any, *shape: Any) -> Any:
        """Broadcast to a shape."""
        if not isinstance(input, Block):
            return self.full(shape[0] if len(shape) == 1 else shape, input)
        return self.reshape(input, *shape)

    def broadcast(self, input: Any, other: Any) -> tuple[Any, Any]:
        """Broadcast both values to their common shape."""
        shape = common_shape((input, other))
        return self.broadcast_to(input, shape), self.broadcast_to(other, shape)

    def expand_dims(self, input: Any, axis: Any) -> Any:
        """Insert dimensions of size 1."""
        shape = list(input.shape)
        for at in sorted([axis] if isinstance(axis, int) else axis):
            shape.insert(at if at >= 0 else len(shape) + 1 + at, 1)
        return input.like(shape)

    unsqueeze = expand_dims

    def squeeze(self, input: Any, dim: int) -> Any:
        """Remove a dimension of size 1."""
        return input.like(_without(input.shape, dim))

    def trans(self, input: Any, *dims: Any) -> Any:
        """Exchange the last two dimensions, or permute all of them."""
        order = _sizes(dims[0] if len(dims) == 1 else dims) or (
            *range(len(input.shape) - 2),
            len(input.shape) - 1,
            len(input.shape) - 2,
        )
        return input.like([input.shape[d] for d in order])

    permute = T = trans

    def ravel(self, input: Any, **_: Any) -> Any:
        """Flatten to one dimension."""
        return input.like((math.prod(input.shape),))

    def join(self, a: Any, b: Any) -> Block:
        """Join two blocks along a new last dimension."""
        both = joined(a, b)
        return both.like((*both.shape, 2))

    def interleave(self, a: Any, b: Any) -> Block:
        """Interleave two blocks along the last dimension."""
        both = joined(a, b)
        return both.like((*both.shape[:-1], 2 * both.shape[-1]))

    def cat(self, input: Any, other: Any, **_: Any) -> Any:
        """Concatenate two blocks."""
        return input.like((input.shape[0] + other.shape[0], *input.shape[1:]))

    def split(self, a: Any) -> tuple[Any, Any]:
        """Split a last dimension of size 2 into two blocks."""
        return a.like(a.shape[:-1]), a.like(a.shape[:-1])

    def gather(self, src: Any, index: Any, axis: int) -> Any:
        """Gather elements of a block."""
        return src.like(index.shape)

    def histogram(self, input: Any, num_bins: int, **_: Any) -> Any:
        """Count the elements in each bin."""
        return input.like((num_bins,))

    # --- along an axis

    def reduce(self, input: Any, axis: Any = None, *_: Any, **named: Any) -> Any:
        """Reduce a block along an axis, or each block of a tuple."""
        if isinstance(input, tuple):
            return tuple(self.reduce(block, axis, **named) for block in input)
        tally().kinds.add("reduction")
        shape = [] if axis is None else _without(input.shape, axis)
        if named.get("keep_dims") and axis is not None:
            shape.insert(axis % len(input.shape), 1)
        found = Block(shape, input.dtype, is_loaded=input.is_loaded)
        return (found, found) if named.get("return_indices") else found

    sum = max = min = argmax = argmin = xor_sum = reduce_or = reduce

    def softmax(self, input: Any, **_: Any) -> Any:
        """Compute a softmax along the last axis."""
        tally().kinds.add("reduction")
        tally().exponential(input.shape)
        return input.like(input.shape)

    def associative_scan(self, input: Any, *_: Any, **__: Any) -> Any:
        """Scan along an axis; the shape stays the same."""
        tally().kinds.add("scan")
        return input

    cumsum = cumprod = associative_scan

    def sort(self, input: Any, *_: Any, **__: Any) -> Any:
        """Sort; the shape stays the same."""
        tally().kinds.add("sort")
        return input

    def topk(self, input: Any, k: int, **_: Any) -> Any:
        """Return the ``k`` largest elements along the last axis."""
        tally().kinds.add("sort")
        return input.like((*input.shape[:-1], k))

    # --- several results

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Any, dtype: Any, *_: Any, **__: Any
    ) -> Any:
        """Run assembler text on every element; returns one block per element type."""
        shape = common_shape(args)
        if isinstance(dtype, tuple):
            return tuple(Block(shape, one, is_loaded=True) for one in dtype)
        return Block(shape, dtype, is_loaded=True)

    def rand4x(self, seed: Any, offset: Any, *_: Any) -> tuple[Any, ...]:
        """Return four random numbers for each offset."""
        return (joined(offset, seed),) * 4

    randint4x = randn4x = philox = rand4x


LANGUAGE = Block.functions = Language()
"""The language that kernels use under the name ``tl``."""


def elementwise(name: str, values: Sequence[Any], named: Any) -> Any:
    """Return the result of an elementwise function."""
    blocks = [v for v in (*values, *named.values()) if isinstance(v, Block)]
    if not blocks:
        known = _PLAIN.get(name)
        return number(known(*values)) if known else Block((), _float32())
    found = blocks[0]
    for other in blocks[1:]:
        found = joined(found, other)
    if name in _EXPONENTIALS:
        tally().exponential(found.shape)
    if name == "where":
        return blocks[-1].like(found.shape)
    return found


def _pointer(base: Any) -> Pointer:
    if not isinstance(base, Pointer):
        raise UnreadableKernelError("it describes memory that is none of the launch's tensors")
    return base


def _touch(n_bytes: MutableMapping[int, int], pointer: Block, shape: Sequence[int]) -> None:
    """Count in ``n_bytes``, by tensor, that a block of ``shape`` is read or written."""
    is_known = isinstance(pointer, Pointer)
    item_bytes = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    n_bytes[pointer.tensor if is_known else ELSEWHERE] += math.prod(shape) * item_bytes
    if is_known and pointer.is_loaded and pointer.shape:
        tally().kinds.add("index")


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in shape) if isinstance(shape, list | tuple) else (int(shape),)


def _without(shape: Sequence[int], axis: int) -> list[int]:
    return [n for at, n in enumerate(shape) if at != axis % len(shape)]


def _float32() -> Any:
    return triton_language().float32
