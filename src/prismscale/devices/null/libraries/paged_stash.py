"""Megatron-LM's paged stash: activations of experts, kept in pages of a buffer until the backward
pass (``megatron/core/transformer/moe/ops/paged_stash.py`` of 0.20).

How many rows there are, and where free pages begin and end, are numbers on the device. Two Triton
kernels copy as many rows as there are, count pages, and set a flag where the buffer is full: the
program then repeats the step without it. What they count is known here wherever their arguments
are, so that the program takes the way that it would take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.launches import launch, memory

COPY, POP = "paged_stash_copy_kernel", "paged_stash_pop_kernel"
_MODULE = "megatron.core.transformer.moe.ops.paged_stash"


def launch_paged_stash(module: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Run a kernel of the stash, given the arguments of its launch; False for any other kernel."""
    if module != _MODULE or name not in (COPY, POP):
        return False
    if name == COPY:
        _copy(arguments)
    else:
        _pop(arguments)
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pages:
    """Free pages of the buffer on the device and of the one on the host."""

    heads: tuple[int, int]
    tails: tuple[int, int]

    def holder_of(self, pages: int) -> int | None:
        """0 for the device, 1 for the host; None where neither has so many left."""
        free = (tail - head for head, tail in zip(self.heads, self.tails, strict=True))
        return next((place for place, left in enumerate(free) if left >= pages), None)


def _copy(given: Mapping[str, Any]) -> None:
    source, overflow = given["src_ptr"], given["overflow_ptr"]
    rows = _rows(given["num_tokens_ptr"], source, given["HIDDEN_SIZE"])
    pages = -(-rows // given["PAGE_SIZE"])
    heads, tails = _pair(given["free_list_head_ptr"]), _pair(given["free_list_tail_ptr"])
    if not given["HAS_HOST_BUFFER"]:
        tails = (tails[0], heads[1])
    is_full = _number(overflow) == 1
    holder = None if is_full else _Pages(heads=heads, tails=tails).holder_of(pages)
    moved = 0 if holder is None else rows
    made = (given["page_record_ptr"], given["new_free_list_head_ptr"], given["spilled_to_host_ptr"])
    buffer = given["host_dst_ptr" if holder else "cuda_dst_ptr"]
    _launch(COPY, given, moved, reads=[source], writes=[buffer, *made])
    taken = [head + pages * (place == holder) for place, head in enumerate(heads)]
    _know(given["new_free_list_head_ptr"], taken)
    _know(given["spilled_to_host_ptr"], [int(holder != 0)])
    if holder == 1:
        _know(given["host_spill_global_ptr"], [1])
    if holder is None:
        _know(overflow, [1])


def _pop(given: Mapping[str, Any]) -> None:
    target = given["dst_ptr"]
    rows = _rows(given["num_tokens_ptr"], target, given["HIDDEN_SIZE"])
    pages = -(-rows // given["PAGE_SIZE"])
    is_full = _number(given["overflow_ptr"]) == 1
    holder = int(_number(given["spilled_to_host_ptr"]) == 1)
    tails = _pair(given["free_list_tail_ptr"])
    moved = 0 if is_full else rows
    buffer = given["host_src_ptr" if holder else "cuda_src_ptr"]
    made = (given["new_free_list_tail_ptr"], given["free_list_cuda_ptr"])
    _launch(POP, given, moved, reads=[buffer], writes=[target, *made])
    given_back = [
        tail + pages * (place == holder and not is_full) for place, tail in enumerate(tails)
    ]
    _know(given["new_free_list_tail_ptr"], given_back)


def _launch(
    name: str, given: Mapping[str, Any], rows: int, *, reads: list[Tensor], writes: list[Tensor]
) -> None:
    row_bytes = given["HIDDEN_SIZE"] * reads[0].element_size()
    cost = memory("index", n_bytes=2 * rows * row_bytes)
    launch(f"triton::{name}", cost, reads=reads, writes=writes)


def _rows(count: Tensor, held: Tensor, width: int) -> int:
    """Rows that are copied: all that the tensor has room for, where nobody knows."""
    room: int = held.numel() // width
    known = value_policy.known(count)
    return room if known is None else min(int(known), room)


def _pair(tensor: Tensor) -> tuple[int, int]:
    """Two numbers; 0 where they are not known."""
    known = value_policy.known(tensor)
    return (0, 0) if known is None else (int(known[0]), int(known[1]))


def _number(tensor: Tensor) -> int:
    """One number; 0 where it is not known."""
    known = value_policy.known(tensor)
    return 0 if known is None else int(known.flatten()[0])


def _know(tensor: Tensor, values: list[int]) -> None:
    value_policy.set_known(tensor, torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))
