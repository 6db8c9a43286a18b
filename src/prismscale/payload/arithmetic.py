"""Arithmetic of collectives in place: what equal contributions come to, and which part is whose.

Nothing here allocates more than a block: the program's memory peak is measured. Tensors may be of
kinds without arithmetic of their own: unsigned integers, booleans, 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

BLOCK_NUMEL = 1 << 16
KIND: Any = ReduceOp.RedOpType
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_IDEMPOTENT = frozenset({KIND.AVG, KIND.MIN, KIND.MAX, KIND.BAND, KIND.BOR})
_PAIRWISE: dict[Any, Callable[..., torch.Tensor]] = {
    KIND.SUM: torch.add,
    KIND.PRODUCT: torch.mul,
    KIND.MAX: torch.maximum,
    KIND.MIN: torch.minimum,
    KIND.BAND: torch.bitwise_and,
    KIND.BOR: torch.bitwise_or,
    KIND.BXOR: torch.bitwise_xor,
}


def kind_of(reduce_op: ReduceOp | None) -> Any:
    """What is done with contributions; summed where nothing was said."""
    return KIND.SUM if reduce_op is None else getattr(reduce_op, "op", reduce_op)


def signed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that has arithmetic."""
    return tensor.view(_UNSIGNED[tensor.dtype]) if tensor.dtype in _UNSIGNED else tensor


def reduce_copies(tensor: torch.Tensor, reduce_op: ReduceOp | None, size: int) -> None:
    """Reduce ``size`` copies of ``tensor`` into itself."""
    kind = kind_of(reduce_op)
    if kind == KIND.PREMUL_SUM:
        scale(signed(tensor), reduce_op.factor * size)  # type: ignore[union-attr]
    elif kind not in _IDEMPOTENT:
        repeat_copies(signed(tensor), kind, size)


def repeat_copies(tensor: torch.Tensor, kind: Any, times: int) -> None:
    """Reduce ``times`` copies by ``kind``; an average is still to be divided."""
    if times == 1:
        return
    if kind in (KIND.SUM, KIND.AVG):
        scale(tensor, times)
    elif kind == KIND.PRODUCT and tensor.is_floating_point() and tensor.element_size() == 1:
        in_float32(tensor, lambda part: part.pow_(times))
    elif kind == KIND.PRODUCT and tensor.dtype is not torch.bool:
        tensor.pow_(times)
    elif kind == KIND.BXOR and times % 2 == 0:
        tensor.zero_()


def accumulate(total: torch.Tensor, term: torch.Tensor, kind: Any, times: int) -> None:
    """Reduce ``times`` copies of ``term``, which is ours to change, into ``total``."""
    if kind in (KIND.SUM, KIND.AVG) and total.is_floating_point() and total.element_size() > 1:
        total.add_(term, alpha=times)
        return
    repeat_copies(term, kind, times)
    pairwise = _PAIRWISE[KIND.SUM if kind == KIND.AVG else kind]
    if total.is_floating_point() and total.element_size() == 1:
        total.copy_(pairwise(total.float(), term.float()))
    else:
        pairwise(total, term, out=total)


def scale(tensor: torch.Tensor, factor: float | torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        return
    if tensor.is_floating_point() and tensor.element_size() == 1:
        in_float32(tensor, lambda part: part.mul_(factor))
    else:
        tensor.mul_(factor)


def in_float32(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change an 8-bit float tensor, which has no arithmetic of its own, a block at a time."""
    blocks = torch.split(tensor.view(-1), BLOCK_NUMEL) if tensor.is_contiguous() else (tensor,)
    for block in blocks:
        wide = block.float()
        change(wide)
        block.copy_(wide)


def chunk(flat: torch.Tensor, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The ``rank``-th part of a contiguous tensor, in the shape of ``like``."""
    start = rank * like.numel()
    return flat.reshape(-1)[start : start + like.numel()].view(like.shape)
