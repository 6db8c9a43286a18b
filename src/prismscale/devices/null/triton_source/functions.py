"""Rebinds the functions of a kernel to a language of shapes in place of Triton's language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CellType, FunctionType, ModuleType
from typing import Any

from prismscale.devices.null.triton_source.blocks import Block, number
from prismscale.devices.null.triton_source.language import LANGUAGE, Language, elementwise

LANGUAGE_NAME = "triton.language"


class _Triton:
    """Stand-in for the module ``triton``, as far as kernels use it."""

    language = LANGUAGE
    cdiv = staticmethod(LANGUAGE.cdiv)
    next_power_of_2 = staticmethod(LANGUAGE.next_power_of_2)


def _least(*values: Any) -> Any:
    return _extreme(min, "minimum", values)


def _most(*values: Any) -> Any:
    return _extreme(max, "maximum", values)


def _extreme(of_numbers: Any, name: str, values: Sequence[Any]) -> Any:
    if any(isinstance(value, Block) for value in values):
        return elementwise(name, values, {})
    return number(of_numbers(*values))


_BUILTINS = {"range": LANGUAGE.range, "min": _least, "max": _most}


def call(kernel: Any, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Trace a kernel made by ``triton.jit`` with the given argument values."""
    return _function(kernel.fn)(*values, **named)


@lru_cache(maxsize=1024)
def _function(real: FunctionType) -> FunctionType:
    """Return a copy of ``real`` that uses the language of shapes."""
    names = {**real.__globals__, **_BUILTINS}
    for name in real.__code__.co_names:
        if name in real.__globals__:
            names[name] = _stand_in(real.__globals__[name])
    cells = tuple(CellType(_stand_in(cell.cell_contents)) for cell in real.__closure__ or ())
    found = FunctionType(real.__code__, names, real.__name__, real.__defaults__, cells)
    found.__kwdefaults__ = real.__kwdefaults__
    return found


def _stand_in(value: Any) -> Any:
    """Return what a kernel finds in place of a global or closure variable."""
    if isinstance(value, ModuleType):
        if value.__name__ == "triton":
            return _Triton
        if value.__name__.startswith(LANGUAGE_NAME):
            return LANGUAGE if value.__name__ == LANGUAGE_NAME else Language(value)
        return value
    if type(value).__name__ == "constexpr":
        return as_value(value.value)
    function = getattr(value, "fn", value)
    if callable(value) and str(getattr(function, "__module__", "")).startswith(LANGUAGE_NAME):
        return getattr(LANGUAGE, function.__name__)
    return as_value(value)


def as_value(value: Any) -> Any:
    """Return numbers as known numbers, in tuples too, and all else unchanged."""
    if isinstance(value, int | float):
        return number(value)
    if type(value) is tuple:
        return tuple(map(as_value, value))
    return value
