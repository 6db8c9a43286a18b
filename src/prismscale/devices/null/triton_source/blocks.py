"""Values in a traced kernel: known numbers, and blocks whose values are unknown.

Integer arguments of a launch, and values computed from them alone, are known: loops and conditions
on them behave as on a GPU. Everything that is loaded is a :class:`Block`, which has a shape and an
element type only. A condition on a single unknown number is guessed, so that the guards at the
beginning of kernels let the program go on: ``if pid >= count: return`` is false, and
``if start < length`` is true.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from prismscale.devices.null.triton_source.tally import UnreadableKernelError, tally

_GUESSES = {"lt": True, "le": True, "ne": True, "gt": False, "ge": False, "eq": False}
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_TO_BOOL = {"and": operator.and_, "or": operator.or_}


class _KnownNumber:
    """A known number, with the attributes that kernels expect of a value."""

    shape: ClassVar[tuple[int, ...]] = ()

    def to(self, dtype: Any, **_: Any) -> Any:
        """Convert to an element type."""
        kind: Any = Real if dtype.is_floating() else Whole
        return self if isinstance(self, kind) else kind(self)

    cast = to


class Whole(_KnownNumber, int):
    """A known integer."""


class Real(_KnownNumber, float):
    """A known floating-point number."""


def number(value: float) -> Whole | Real | bool:
    """Return ``value`` as a known number."""
    if isinstance(value, bool):
        return value
    return Whole(value) if isinstance(value, int) else Real(value)


def _keep_numbers() -> None:
    """Make operations on known numbers return known numbers."""
    for reflected in ("", "r"):
        for name in _ARITHMETIC:
            _keep(Whole, f"__{reflected}{name}__")
            _keep(Real, f"__{reflected}{name}__")
        for name in _BITWISE:
            _keep(Whole, f"__{reflected}{name}__")
    for name in ("__neg__", "__abs__"):
        _keep(Whole, name)
        _keep(Real, name)


def _keep(kind: type, name: str) -> None:
    plain = getattr(kind.__base__, name)

    def operate(self: Any, *others: Any) -> Any:
        found = plain(self, *others)
        return found if found is NotImplemented else number(found)

    setattr(kind, name, operate)


_keep_numbers()


class Block:
    """A block of unknown numbers, with a shape and an element type."""

    functions: ClassVar[Any]
    """Functions of Triton's language, which are methods of blocks too. :mod:`.language` sets it."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        is_loaded: bool = False,
        guess: bool = True,
    ) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = dtype
        self.is_loaded = is_loaded
        """Whether its values depend on the content of a tensor."""
        self.guess = guess
        """Its truth value when it is used as a condition."""
        tally().step()

    @property
    def type(self) -> Any:
        """The element type, under Triton's other name for it."""
        return self.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def like(self, shape: Sequence[int]) -> Block:
        """Return a block of another shape with the same properties."""
        return Block(shape, self.dtype, is_loaded=self.is_loaded, guess=self.guess)

    def __getitem__(self, key: Any) -> Block:
        keys = key if isinstance(key, tuple) else (key,)
        sizes = iter(self.shape)
        shape = [1 if k is None else next(sizes) for k in keys]
        if not all(k is None or k == slice(None) for k in keys):
            raise UnreadableKernelError("it takes single elements out of a block")
        return self.like((*shape, *sizes))

    def __getattr__(self, name: str) -> Any:
        # All other methods of a block are functions of Triton's language.
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(self.functions, name)
        return function(self) if name == "T" else partial(function, self)

    def __bool__(self) -> bool:
        if self.numel != 1:
            raise UnreadableKernelError("a condition on a whole block")
        return self.guess

    def __index__(self) -> int:
        raise UnreadableKernelError("a number that a tensor holds decides how often it loops")

    __int__ = __index__

    def __float__(self) -> float:
        raise UnreadableKernelError("a number that a tensor holds is used as a constant")

    def __iter__(self) -> Any:
        raise UnreadableKernelError("a block is taken apart")

    def __neg__(self) -> Block:
        return self.like(self.shape)

    __abs__ = __neg__

    def __invert__(self) -> Block:
        found = self.like(self.shape)
        found.guess = not self.guess
        return found

    __hash__ = object.__hash__


class Pointer(Block):
    """A block of addresses within one tensor of the launch."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        tensor: int,
        at: int | None = None,
        is_loaded: bool = False,
    ) -> None:
        super().__init__(shape, dtype, is_loaded=is_loaded)
        self.tensor = tensor
        """The tensor's place among the launch's tensors."""
        self.at = at
        """Index of the one element to which it points, if that is known."""

    def like(self, shape: Sequence[int]) -> Pointer:
        """Return a pointer block of another shape into the same tensor."""
        return Pointer(shape, self.dtype, tensor=self.tensor, is_loaded=self.is_loaded)


def _operation(name: str) -> Callable[[Any, Any], Any]:
    def operate(self: Block, other: Any) -> Block:
        return joined(self, other, name)

    return operate


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    def compare(self: Block, other: Any) -> Block:
        return _compared(self, other, name)

    return compare


def _compared(block: Block, other: Any, name: str) -> Block:
    found = joined(block, other, name)
    return Block(found.shape, found.dtype, is_loaded=found.is_loaded, guess=_GUESSES[name])


def _keep_order(kind: type, name: str) -> None:
    """Keep the order of a comparison with a number on the left of a block.

    Python would call the block's reflected comparison, whose guess differs.
    """
    plain = getattr(kind.__base__, f"__{name}__")

    def compare(self: Any, other: Any) -> Any:
        return _compared(other, self, name) if isinstance(other, Block) else plain(self, other)

    setattr(kind, f"__{name}__", compare)


for _name in (*_ARITHMETIC, *_BITWISE):
    setattr(Block, f"__{_name}__", _operation(_name))
    setattr(Block, f"__r{_name}__", _operation(_name))
for _name in _GUESSES:
    setattr(Block, f"__{_name}__", _comparison(_name))
    _keep_order(Whole, _name)
    _keep_order(Real, _name)


def joined(one: Block, other: Any, name: str = "") -> Block:
    """Return the result of an operation on two values: their broadcast shape and wider type."""
    shape = common_shape((one, other))
    is_loaded = one.is_loaded or getattr(other, "is_loaded", False)
    for pointer, offset in ((one, other), (other, one)):
        if isinstance(pointer, Pointer):
            return Pointer(
                shape,
                pointer.dtype,
                tensor=pointer.tensor,
                at=_moved(pointer, offset, name),
                is_loaded=is_loaded,
            )
    guess = one.guess
    if name in _TO_BOOL:
        others = other.guess if isinstance(other, Block) else bool(other)
        guess = _TO_BOOL[name](guess, others)
    return Block(shape, wider(one, other), is_loaded=is_loaded, guess=guess)


def _moved(pointer: Pointer, offset: Any, name: str) -> int | None:
    """Return the index of the element at ``pointer + offset``, if it is known."""
    if pointer.at is None or not isinstance(offset, int) or name not in ("add", "sub"):
        return None
    return pointer.at + (offset if name == "add" else -offset)


def wider(one: Block, other: Any) -> Any:
    """Return the result type of an operation: addresses win, then floats, then the wider type."""
    if not isinstance(other, Block):
        return one.dtype
    types = (one.dtype, other.dtype)
    for dtype in types:
        if dtype.is_ptr():
            return dtype
    return max(types, key=lambda t: (t.is_floating(), t.primitive_bitwidth))


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a block, or () for a number."""
    return value.shape if isinstance(value, Block) else ()


def common_shape(values: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape to which all of ``values`` are broadcast."""
    shapes = [shape_of(value) for value in values]
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(map(max, zip(*padded, strict=True))) if rank else ()
