"""Megatron-LM's paged stash: keeps activations of experts in a buffer until the backward pass.

The buffer consists of pages. The number of rows, and where free pages begin and end, are numbers on
the device. Two Triton kernels copy the rows, count pages, and set a flag if the buffer is full: the
program then repeats the step without the stash. The results of the kernels are known here if their
arguments are, so that the program takes the same path as on a GPU. Source:
``megatron/core/transformer/moe/ops/paged_stash.py`` of 0.20, and ``moe/paged_stash.py`` of the
commit in NeMo 26.06, whose kernels have an underscore before their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.launches import launch, memory

COPY, POP = "paged_stash_copy_kernel", "paged_stash_pop_kernel"
DEVICE, HOST = 0, 1
"""Owner of pages: its index in the heads and tails of the lists of free pages."""
_MODULES = (
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.transformer.moe.paged_stash",
)


def launch_paged_stash(module: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Run a kernel of the stash with the arguments of its launch; False for any other kernel."""
    kernel = name.removeprefix("_")
    if module not in _MODULES or kernel not in (COPY, POP):
        return False
    if kernel == COPY:
        _copy(arguments)
    else:
        _pop(arguments)
    return True


def _copy(given: Mapping[str, Any]) -> None:
    source, overflow = given["src_ptr"], given["overflow_ptr"]
    rows = _rows(given["num_tokens_ptr"], source, given["HIDDEN_SIZE"])
    pages = -(-rows // given["PAGE_SIZE"])
    heads = _numbers(given["free_list_head_ptr"])
    holder = None if _is_set(overflow) else _holder(given, heads, pages)
    made = (given["page_record_ptr"], given["new_free_list_head_ptr"], given["spilled_to_host_ptr"])
    buffer = given["host_dst_ptr" if holder else "cuda_dst_ptr"]
    moved = 0 if holder is None else rows
    _launch(COPY, given, moved, reads=[source], writes=[buffer, *made])
    if heads:
        taken = [head + pages * (place == holder) for place, head in enumerate(heads)]
        value_policy.state(given["new_free_list_head_ptr"], taken)
    value_policy.state(given["spilled_to_host_ptr"], [int(holder != DEVICE)])
    if holder == HOST:
        value_policy.state(given["host_spill_global_ptr"], [1])
    if holder is None:
        value_policy.state(overflow, [1])


def _holder(given: Mapping[str, Any], heads: Sequence[int], pages: int) -> int | None:
    """Return whose buffer has ``pages`` pages left, or None if neither has.

    If the numbers of free pages are unknown, it is the device's.
    """
    tails = _numbers(given["free_list_tail_ptr"])
    if not (heads and tails):
        return DEVICE
    free = {DEVICE: tails[DEVICE] - heads[DEVICE]}
    if given["HAS_HOST_BUFFER"]:
        free[HOST] = tails[HOST] - heads[HOST]
    return next((place for place, left in free.items() if left >= pages), None)


def _pop(given: Mapping[str, Any]) -> None:
    target = given["dst_ptr"]
    rows = _rows(given["num_tokens_ptr"], target, given["HIDDEN_SIZE"])
    if _is_set(given["overflow_ptr"]):
        rows = 0
    pages = -(-rows // given["PAGE_SIZE"])
    holder = HOST if _is_set(given["spilled_to_host_ptr"]) else DEVICE
    tails = _numbers(given["free_list_tail_ptr"])
    buffer = given["host_src_ptr" if holder else "cuda_src_ptr"]
    made = (given["new_free_list_tail_ptr"], given["free_list_cuda_ptr"])
    _launch(POP, given, rows, reads=[buffer], writes=[target, *made])
    if tails:
        given_back = [tail + pages * (place == holder) for place, tail in enumerate(tails)]
        value_policy.state(given["new_free_list_tail_ptr"], given_back)


def _launch(
    name: str, given: Mapping[str, Any], rows: int, *, reads: list[Tensor], writes: list[Tensor]
) -> None:
    row_bytes = given["HIDDEN_SIZE"] * reads[0].element_size()
    cost = memory("index", n_bytes=2 * rows * row_bytes)
    launch(f"triton::{name}", cost, reads=reads, writes=writes)


def _rows(count: Tensor, held: Tensor, width: int) -> int:
    """Return the number of copied rows; if it is unknown, all that ``held`` has room for."""
    room: int = held.numel() // width
    known = value_policy.known(count)
    return room if known is None else min(int(known), room)


def _numbers(tensor: Tensor) -> list[int]:
    """Return the numbers in a small tensor; an empty list if they are unknown."""
    known = value_policy.known(tensor)
    return [] if known is None else known.flatten().tolist()


def _is_set(flag: Tensor) -> bool:
    """Return whether a flag is known to be 1."""
    return _numbers(flag) == [1]
