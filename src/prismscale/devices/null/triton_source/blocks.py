"""What a kernel computes with while it is followed: numbers that are known, blocks that are not.

Integers that a launch is given, and what follows from them alone, are known: loops and conditions
on them go as they would on a GPU. All that is loaded is a :class:`Block`: a shape and an element
type. A condition on one number that is not known is taken to hold as in the guards that kernels
begin with: ``if pid >= count: return`` does not, ``if start < length`` does.
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
    """A number that is known."""

    shape: ClassVar[tuple[int, ...]] = ()

    def to(self, dtype: Any, **_: Any) -> Any:
        """A conversion."""
        kind: Any = Real if dtype.is_floating() else Whole
        return self if isinstance(self, kind) else kind(self)

    cast = to


class Whole(_KnownNumber, int):
    """An integer that is known."""


class Real(_KnownNumber, float):
    """A floating-point number that is known."""


def number(value: float) -> Whole | Real | bool:
    """``value`` as kernels know numbers."""
    if isinstance(value, bool):
        return value
    return Whole(value) if isinstance(value, int) else Real(value)


def _keep_numbers() -> None:
    """What is computed from known numbers has their methods."""
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
    """Numbers that are not known: how many, of which element type."""

    functions: ClassVar[Any]
    """Of Triton's language, which are methods, too; they set it themselves."""

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
        """It follows from what a tensor holds."""
        self.guess = guess
        """What it is taken for as a condition."""
        tally().step()

    @property
    def type(self) -> Any:
        """As Triton names it."""
        return self.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def like(self, shape: Sequence[int]) -> Block:
        """Another shape of the same."""
        return Block(shape, self.dtype, is_loaded=self.is_loaded, guess=self.guess)

    def __getitem__(self, key: Any) -> Block:
        keys = key if isinstance(key, tuple) else (key,)
        sizes = iter(self.shape)
        shape = [1 if k is None else next(sizes) for k in keys]
        if not all(k is None or k == slice(None) for k in keys):
            raise UnreadableKernelError("it takes single elements out of a block")
        return self.like((*shape, *sizes))

    def __getattr__(self, name: str) -> Any:
        # Its other methods are functions of Triton's language.
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
    """Addresses within a tensor of the launch, and how much of it each stands for."""

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
        """Its place among the arguments."""
        self.at = at
        """The one element that it points to, where that is known."""

    def like(self, shape: Sequence[int]) -> Pointer:
        """Another shape of the same."""
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
    """A number to the left of a block: Python would ask the block the other way round."""
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
    """What an operation on two values gives: their shapes joined, the wider of their types."""
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
    """The element behind ``pointer + offset``."""
    if pointer.at is None or not isinstance(offset, int) or name not in ("add", "sub"):
        return None
    return pointer.at + (offset if name == "add" else -offset)


def wider(one: Block, other: Any) -> Any:
    """The element type of an operation on both: addresses win, then floats, then the wider."""
    if not isinstance(other, Block):
        return one.dtype
    types = (one.dtype, other.dtype)
    for dtype in types:
        if dtype.is_ptr():
            return dtype
    return max(types, key=lambda t: (t.is_floating(), t.primitive_bitwidth))


def shape_of(value: Any) -> tuple[int, ...]:
    """Of a block; numbers have no dimensions."""
    return value.shape if isinstance(value, Block) else ()


def common_shape(values: Sequence[Any]) -> tuple[int, ...]:
    """The shape that all of ``values`` are broadcast to."""
    shapes = [shape_of(value) for value in values]
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(map(max, zip(*padded, strict=True))) if rank else ()
