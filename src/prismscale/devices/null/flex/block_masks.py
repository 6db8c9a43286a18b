"""Determines how many blocks of attention scores a block mask leaves.

A :class:`BlockMask` says for each block of queries how many blocks of keys it meets. torch computes
these numbers by calling a mask function for all scores, which does not happen here. But the values
that such a function reads (positions, where a document begins) often came from the host and are
known. So after a mask is made, its function is called on the host for some points of every block,
and the numbers of blocks are set accordingly. If the function reads an unknown value, nothing is
set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.value_policy import known

_POINTS = 9
"""Points per block, both of its queries and of its keys: the first, the last and between them."""
_MOST_SCORES = 2**23
"""Most scores that are evaluated for one mask; above that, some blocks of queries are skipped."""
_Mask = Callable[..., Any]


class _UnknownValueError(Exception):
    """The mask function reads a value that is not known."""


class _OnHost(TorchFunctionMode):
    """Calls functions of torch with known host copies in place of the device's tensors."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*map(_on_host, args), **{k: _on_host(v) for k, v in (kwargs or {}).items()})


def _on_host(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_on_host, value))
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    copy = known(value)
    if copy is None:
        raise _UnknownValueError
    return copy


def install(without_cost: Callable[[int], None]) -> None:
    """Set the block counts of every mask that ``create_block_mask`` makes, compiled or not.

    Args:
        without_cost: called with 1 before, and with 0 after, work that costs the program nothing.
    """
    Watcher(
        {"torch.nn.attention.flex_attention": lambda module: _watch(module, without_cost)}
    ).begin()


def _watch(module: Any, without_cost: Callable[[int], None]) -> None:
    create, compile_now = module.create_block_mask, torch.compile

    def noted(make: _Mask) -> _Mask:
        @wraps(create)
        def create_block_mask(*args: Any, **named: Any) -> Any:
            mask = make(*args, **named)
            if not torch.compiler.is_compiling():
                without_cost(1)
                try:
                    note_blocks(mask)
                finally:
                    without_cost(0)
            return mask

        return create_block_mask

    module.create_block_mask = noted(create)

    @wraps(compile_now)
    def compile_later(model: Any = None, **options: Any) -> Any:
        # Traced code cannot look at values, so the counts are set after the compiled function.
        if model is module.create_block_mask:
            return noted(compile_now(create, **options))
        return compile_now(model, **options)

    torch.compile = compile_later


def note_blocks(mask: Any) -> None:
    """Set the numbers of key blocks of ``mask``, a :class:`BlockMask`, where they are known."""
    if not mask.kv_num_blocks.is_cuda:
        return
    met = _blocks_met(mask)
    if met is None:
        return
    any_met, all_met = met
    if mask.full_kv_num_blocks is None:
        mask.kv_num_blocks.copy_(any_met)
    else:
        mask.kv_num_blocks.copy_(any_met - all_met)
        mask.full_kv_num_blocks.copy_(all_met)


def share_of_blocks(
    partial: torch.Tensor, columns: torch.Tensor, full: torch.Tensor | None
) -> float | None:
    """Return the share of blocks that a mask leaves, or None where it is not known.

    Args:
        partial: numbers of key blocks, by batch, head and block of queries.
        columns: indices of the key blocks; the last dimension has room for all of them.
        full: numbers of key blocks in which nothing is masked, if they are counted separately.
    """
    counts = [known(tensor) for tensor in (partial, full) if tensor is not None]
    met = sum(float(count.sum()) for count in counts if count is not None)
    return None if None in counts else met / (partial.numel() * columns.shape[-1])


def _blocks_met(mask: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Count the key blocks in which any score is left, and those in which every score is left.

    Both results have the shape and type of the mask's own numbers. None where they are not known.
    """
    numbers = mask.kv_num_blocks
    batch, heads, rows = numbers.shape
    queries, keys = (
        _points(int(length), int(size))
        for length, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)
    )
    every = max(1, -(-batch * heads * queries.numel() * keys.numel() // _MOST_SCORES))
    looked_at = range(0, rows, every)
    left = _ask(mask.mask_mod, batch, heads, queries[looked_at].reshape(-1), keys.reshape(-1))
    if left is None:
        return None
    blocks = left.view(torch.uint8).unflatten(3, (-1, _POINTS)).unflatten(2, (-1, _POINTS))
    # One sum over bytes: several times quicker than any() and all() along dimensions this short.
    of_block = blocks.sum((3, 5), dtype=torch.int32).expand(batch, heads, -1, -1)
    counts = ((of_block >= least).sum(-1) for least in (1, _POINTS**2))
    some, whole = (
        count.repeat_interleave(every, dim=2)[:, :, :rows].to(numbers.dtype) for count in counts
    )
    return some, whole


def _points(length: int, block: int) -> torch.Tensor:
    """Return the positions that are evaluated: blocks × points of a block."""
    inside = torch.linspace(0, min(block, length) - 1, _POINTS).long()
    starts = torch.arange(0, length, block)
    return (starts[:, None] + inside).clamp(max=length - 1)


def _ask(
    function: _Mask, batch: int, heads: int, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Call the mask function on the host; None if it cannot be called there.

    The result is batch × heads × queries × keys, where batch and heads may be 1.
    """
    places = (
        torch.arange(batch).reshape(-1, 1, 1, 1),
        torch.arange(heads).reshape(-1, 1, 1),
        queries.reshape(-1, 1),
        keys,
    )
    try:
        with _OnHost():
            answers = torch.as_tensor(function(*places))
    except (_UnknownValueError, RuntimeError, IndexError):
        return None  # it reads an unknown value, or takes only single indices
    whole = torch.broadcast_shapes(answers.shape, (1, 1, queries.numel(), keys.numel()))
    return answers.broadcast_to(whole).bool().contiguous()
