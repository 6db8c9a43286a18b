"""The language of ``--where``, a condition that selects points of a sweep.

A condition is an expression over the varied names with numbers, quoted text, ``+ - * / // %``,
comparisons (also chained), ``in (…)``, ``and``, ``or``, ``not`` and parentheses. Python's parser
reads it and this module evaluates the tree, so Python never executes it. There are no calls,
attributes, indices or powers.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prismscale.errors import UsageError, did_you_mean

LONGEST = 1_000
"""Most characters of an expression: deeply nested ones would end Python's parser."""
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_MEND = "allowed: names, numbers, 'text', + - * / // %, comparisons, in (…), and, or, not"


class Condition:
    """A condition that was parsed and checked to be in the language."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        """
        Args:
            text: the expression; an empty one always holds.
            names: names that it may use.

        Raises:
            UsageError: it is no expression of the language, or uses a name not in ``names``.
        """
        self.text = text.strip()
        if len(self.text) > LONGEST:
            raise UsageError(f"--where has {len(self.text):,} characters; allowed: {LONGEST:,}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of spellings such as 4and 5
                self._tree = ast.parse(self.text or "True", mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            shown = self.text if len(self.text) <= 80 else f"{self.text[:80]}…"
            raise UsageError(f"--where {shown!r} is no condition: {error}; {_MEND}") from error
        _check(self._tree, frozenset(names), self.text)

    def holds(self, values: Mapping[str, str]) -> bool:
        """Whether the condition holds for these values; text that looks like a number is one.

        Raises:
            UsageError: the values cannot be compared, or an operation on them fails.
        """
        try:
            return bool(_value(self._tree, values))
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            shown = ", ".join(f"{name}={value}" for name, value in values.items())
            raise UsageError(f"--where {self.text!r} cannot be told for {shown}: {error}") from None


def _check(node: ast.expr, names: frozenset[str], text: str) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name(id=name):
            if name not in names:
                raise UsageError(f"--where knows no {name!r}; {did_you_mean(name, names)}")
            return
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts):
            inner = parts
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            inner = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            inner = [left, right]
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            inner = [left, *rest]
        case _:
            part = ast.get_source_segment(text, node) or text
            raise UsageError(f"--where {text!r}: {part!r} is not in its language; {_MEND}")
    for one in inner:
        _check(one, names, text)


def _value(node: ast.expr, values: Mapping[str, str]) -> Any:
    match node:
        case ast.Constant(value=constant):
            return number_or_text(constant) if isinstance(constant, str) else constant
        case ast.Name(id=name):
            return number_or_text(values[name])
        case ast.Tuple(elts=parts):
            return tuple(_value(part, values) for part in parts)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(operand=operand):
            return -_number(_value(operand, values))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _number(_value(left, values)), _number(_value(right, values))
            return _ARITHMETIC[type(op)](a, b)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return _compared(_value(left, values), ops, rest, values)
    raise AssertionError(node)  # not reached: every node that _check accepts is handled above


def _compared(
    left: Any, ops: list[ast.cmpop], rest: list[ast.expr], values: Mapping[str, str]
) -> bool:
    for op, node in zip(ops, rest, strict=True):
        right = _value(node, values)
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def _number(value: Any) -> Any:
    # Refuse text: text times a large number would be text of any length.
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


def number_or_text(text: str) -> int | float | str:
    """Return ``64`` and ``0.5`` as numbers and any other text as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
