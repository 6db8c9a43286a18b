"""In-place arithmetic of collectives: reductions of equal contributions, and a member's chunk.

Nothing here allocates more than a block, because the program's memory peak is measured. Tensors may
have dtypes without arithmetic of their own: unsigned integers, booleans, 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ReduceOp

BLOCK_NUMEL = 1 << 16
KIND: Any = ReduceOp.RedOpType
HALF = frozenset({torch.float16, torch.bfloat16})
"""Floats that are added in single precision where all contributions are at hand."""
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
    """Return the kind of a reduction; SUM if the program named none."""
    return KIND.SUM if reduce_op is None else getattr(reduce_op, "op", reduce_op)


def factor_of(reduce_op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM; until torch 2.12 only its pickled state has it."""
    if hasattr(reduce_op, "factor"):
        return reduce_op.factor
    return reduce_op.__getstate__()[1]


def signed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that has arithmetic."""
    return tensor.view(_UNSIGNED[tensor.dtype]) if tensor.dtype in _UNSIGNED else tensor


def reduce_copies(tensor: torch.Tensor, reduce_op: ReduceOp | None, size: int) -> None:
    """Reduce ``size`` copies of ``tensor`` into itself."""
    kind = kind_of(reduce_op)
    if kind == KIND.PREMUL_SUM:
        scale(signed(tensor), factor_of(reduce_op) * size)
    elif kind not in _IDEMPOTENT:
        repeat_copies(signed(tensor), kind, size)


def repeat_copies(tensor: torch.Tensor, kind: Any, times: int) -> None:
    """Reduce ``times`` copies into ``tensor`` by ``kind``; the caller divides an average."""
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
    """Reduce ``times`` copies of ``term`` into ``total``; ``term`` may be overwritten."""
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
    """Multiply by ``factor`` in place. Booleans stay: a sum of equal ones is the same boolean."""
    if tensor.dtype is torch.bool:
        return
    if tensor.is_floating_point() and tensor.element_size() == 1:
        in_float32(tensor, lambda part: part.mul_(factor))
    else:
        tensor.mul_(factor)


def divide(total: torch.Tensor, size: int) -> None:
    """Divide a sum of ``size`` contributions in place, as NCCL and gloo do for an average.

    Integers are cut to whole numbers, and booleans stay. Multiplying by a reciprocal such as 1 / 3
    would round twice.
    """
    if total.dtype is torch.bool:
        return
    if total.dtype in _UNSIGNED:
        for (block,) in _blocks(total):
            # Not in a signed view: the sum may be larger than the signed type's largest number.
            block.copy_(block.long().div_(size, rounding_mode="trunc"))
    elif not (total.is_floating_point() or total.is_complex()):
        total.div_(size, rounding_mode="trunc")
    elif total.is_floating_point() and total.element_size() == 1:
        in_float32(total, lambda part: part.div_(size))
    else:
        total.div_(size)


def in_float32(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change an 8-bit float tensor, which has no arithmetic of its own, block by block."""
    for (block,) in _blocks(tensor):
        wide = block.float()
        change(wide)
        block.copy_(wide)


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of matching parts of tensors of one shape.

    Each view has at most :data:`BLOCK_NUMEL` elements; together they cover the tensors.
    """
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
    """Return the ``rank``-th part of a contiguous tensor, in the shape of ``like``."""
    start = rank * like.numel()
    return flat.reshape(-1)[start : start + like.numel()].view(like.shape)
