"""Arithmetic of collectives in place: what equal contributions come to, and which part is whose.

Nothing here allocates more than a block: the program's memory peak is measured. Tensors may be of
kinds without arithmetic of their own: unsigned integers, booleans, 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def factor_of(reduce_op: Any) -> float | torch.Tensor:
    """What PREMUL_SUM multiplies contributions with; until torch 2.12 its state alone has it."""
    if hasattr(reduce_op, "factor"):
        return reduce_op.factor
    return reduce_op.__getstate__()[1]


def signed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that has arithmetic."""
    return tensor.view(_UNSIGNED[tensor.dtype]) if tensor.dtype in _UNSIGNED else tensor


def reduce_copies(tensor: torch.Tensor, reduce_op: ReduceOp | None, size: int) -> None:
    """Reduce ``size`` copies of ``tensor`` into itself."""
    kind = kind_of(reduce_op)
    if kind == KIND.PREMUL_SUM:
        scale(signed(tensor), factor_of(reduce_op) * size)
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
        for part, added in _blocks(total, term):
            part.copy_(pairwise(part.float(), added.float()))
    else:
        pairwise(total, term, out=total)


def scale(tensor: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiply a tensor by ``factor`` in place. A sum of equal booleans is the same boolean."""
    if tensor.dtype is torch.bool:
        return
    if tensor.is_floating_point() and tensor.element_size() == 1:
        in_float32(tensor, lambda part: part.mul_(factor))
    else:
        tensor.mul_(factor)


def in_float32(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change an 8-bit float tensor, which has no arithmetic of its own, a block at a time."""
    for (block,) in _blocks(tensor):
        wide = block.float()
        change(wide)
        block.copy_(wide)


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same part of tensors of one shape, :data:`BLOCK_NUMEL` elements or fewer each;
    together they are the whole."""
    shape = tensors[0].shape
    if shape.numel() <= BLOCK_NUMEL:
        yield tensors
    elif all(t.is_contiguous() for t in tensors):
        yield from zip(*(torch.split(t.view(-1), BLOCK_NUMEL) for t in tensors), strict=True)
    else:
        # Halves along the longest dim: a flat view of these strides would be a copy.
        dim = shape.index(max(shape))
        for halves in zip(*(torch.chunk(t, 2, dim) for t in tensors), strict=True):
            yield from _blocks(*halves)


def chunk(flat: torch.Tensor, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The ``rank``-th part of a contiguous tensor, in the shape of ``like``."""
    start = rank * like.numel()
    return flat.reshape(-1)[start : start + like.numel()].view(like.shape)
