"""Remainders of reductions: what is left of a result without some contributions.

================ ==========================================================================
sum, avg         result minus the contributions (avg: result times the members), in twice the
                 precision; modulo 2 ** n for integers
bxor             the same by exclusive or
min, max, band,  the result itself: reducing the contributions again changes nothing, as long as
bor, sum of bool they are the same as in the recording
product          result divided by the contributions, of floats that are finite and not 0
================ ==========================================================================

Where that is impossible (a product of integers, or with a 0; 8-bit floats, whose sums are rounded
to 3 bits), the remainder is computed from the absent members' own contributions: *exactly*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prismscale.payload.arithmetic import HALF, KIND, accumulate, divide, signed

_IDEMPOTENT = frozenset({KIND.MIN, KIND.MAX, KIND.BAND, KIND.BOR})
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_DIVISIBLE = frozenset({torch.float32, torch.float64})


def partial_kind(kind: Any) -> Any:
    """Return how contributions are reduced on the way: an average is divided at the end."""
    return KIND.SUM if kind == KIND.AVG else kind


def neutral(like: torch.Tensor, kind: Any) -> torch.Tensor:
    """Return a tensor like ``like`` that changes no result of a reduction."""
    value: float | bool = 0
    if kind == KIND.PRODUCT:
        value = 1
    elif kind in (KIND.MIN, KIND.MAX):
        value = _limit(like.dtype, highest=kind == KIND.MIN)
    elif kind == KIND.BAND:
        if like.dtype.is_floating_point or like.dtype is torch.bool:
            value = 1
        else:
            return signed(torch.zeros_like(like)).bitwise_not_().view(like.dtype)
    return torch.full_like(like, value)


def remainder(
    result: torch.Tensor, added: Sequence[torch.Tensor], kind: Any, size: int
) -> torch.Tensor | None:
    """Return the remainder that, reduced with ``added``, gives ``result`` of a group of ``size``.

    Tensors are flat. Return None where only what others contribute can tell.
    """
    dtype = result.dtype
    is_bool_sum = dtype is torch.bool and partial_kind(kind) == KIND.SUM
    if kind in _IDEMPOTENT or is_bool_sum:
        return result.clone()
    if dtype.is_floating_point and dtype.itemsize == 1:
        return None
    if kind == KIND.BXOR:
        left = signed(result).clone()
        for term in added:
            left ^= signed(term)
        return left.view(dtype)
    if kind == KIND.PRODUCT:
        return _quotient(result, added)
    if not (dtype.is_floating_point or dtype.is_complex):
        left = signed(result).clone()
        for term in added:
            left -= signed(term)
        return left.view(dtype) if kind == KIND.SUM else None
    return _difference(result, added, size if kind == KIND.AVG else 1)


def exact(contributions: Sequence[torch.Tensor], kind: Any, *, size: int = 1) -> torch.Tensor:
    """Reduce ``contributions`` as the recorded run did: half-precision floats in single precision.

    An average is divided by ``size``: the number of members, if these are all contributions.
    """
    dtype = contributions[0].dtype
    total = contributions[0].to(torch.float32 if dtype in HALF else dtype, copy=True)
    for term in contributions[1:]:
        accumulate(signed(total), signed(term.clone()), partial_kind(kind), 1)
    if kind == KIND.AVG and size > 1:
        divide(total, size)
    return total.to(dtype)


def _difference(
    result: torch.Tensor, added: Sequence[torch.Tensor], times: int
) -> torch.Tensor | None:
    wide = _WIDER.get(result.dtype, result.dtype)
    left = result.to(wide) * times
    taken = sum((term.to(wide) for term in added), torch.zeros_like(left))
    rest = left - taken
    # Infinity minus infinity is NaN: where live members brought the infinity, the rest is 0.
    known = torch.isfinite(taken)
    return torch.where(known | torch.isnan(left), rest, torch.zeros_like(rest)).to(result.dtype)


def _quotient(result: torch.Tensor, added: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if result.dtype not in _DIVISIBLE:
        return None
    taken = torch.ones_like(result, dtype=torch.float64)
    for term in added:
        taken *= term
    left = result.to(torch.float64) / taken
    is_known = torch.isfinite(left) & torch.isfinite(result) & (result != 0)
    return left.to(result.dtype) if bool(is_known.all()) else None


def _limit(dtype: torch.dtype, *, highest: bool) -> float | bool:
    if dtype is torch.bool:
        return highest
    if dtype.is_floating_point:
        if dtype.itemsize == 1:
            return torch.finfo(dtype).max if highest else torch.finfo(dtype).min
        return float("inf") if highest else float("-inf")
    info = torch.iinfo(dtype)
    return info.max if highest else info.min
