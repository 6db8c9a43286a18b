"""Megatron-LM's paged stash: what is copied, and when a program is told that it overflowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.paged_stash import COPY, POP, launch_paged_stash
from support import op_log

MODULE = "megatron.core.transformer.moe.ops.paged_stash"
WIDTH, PAGE, ROOM = 256, 64, 1024
"""Elements of a row, rows of a page, rows of the tensor that is stashed."""


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cuda")


class Stash:
    """A buffer of ``pages`` on the device, and as many on the host as are asked for."""

    def __init__(self, *, pages: int, of_host: int = 0) -> None:
        self.buffer = torch.empty(pages * PAGE, WIDTH, dtype=torch.uint8, device="cuda")
        self.of_host = of_host
        self.heads, self.tails = numbers(0, 0), numbers(pages, of_host)
        self.overflow, self.spill = numbers(0), numbers(0)
        self.free = torch.arange(pages, device="cuda")

    def copied(self, rows: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Bytes that the kernel moves, and which buffer it says that it took."""
        self.tensor = torch.empty(ROOM, WIDTH, dtype=torch.uint8, device="cuda")
        spilled, heads = numbers(0), torch.empty_like(self.heads)
        moved = launched(
            COPY,
            src_ptr=self.tensor,
            cuda_dst_ptr=self.buffer,
            host_dst_ptr=self.buffer,
            num_tokens_ptr=rows,
            free_list_head_ptr=self.heads,
            free_list_tail_ptr=self.tails,
            page_record_ptr=numbers(0),
            overflow_ptr=self.overflow,
            host_spill_global_ptr=self.spill,
            spilled_to_host_ptr=spilled,
            new_free_list_head_ptr=heads,
            HAS_HOST_BUFFER=int(self.of_host > 0),
        )
        self.heads.copy_(heads)
        return moved, spilled

    def popped(self, rows: torch.Tensor, spilled: torch.Tensor) -> int:
        """Bytes that come back."""
        tails = torch.empty_like(self.tails)
        moved = launched(
            POP,
            cuda_src_ptr=self.buffer,
            host_src_ptr=self.buffer,
            dst_ptr=self.tensor,
            num_tokens_ptr=rows,
            spilled_to_host_ptr=spilled,
            overflow_ptr=self.overflow,
            free_list_cuda_ptr=self.free,
            free_list_tail_ptr=self.tails,
            new_free_list_tail_ptr=tails,
        )
        self.tails.copy_(tails)
        return moved


def launched(name: str, **arguments: Any) -> int:
    """Bytes of the kernel's one record."""
    given = {**arguments, "HIDDEN_SIZE": WIDTH, "PAGE_SIZE": PAGE}
    (record,) = op_log.ops_of(lambda: launch_paged_stash(MODULE, name, given))
    (n_bytes,) = record.signature.arguments["extents"]
    return int(n_bytes)


def test_as_many_rows_are_copied_as_the_device_counts() -> None:
    """Not all that the tensor has room for; the buffer's pages are counted."""
    stash = Stash(pages=16)
    moved, spilled = stash.copied(numbers(100))

    assert moved == 2 * 100 * WIDTH
    assert stash.heads.tolist() == [2, 0]
    assert (stash.overflow.item(), spilled.item()) == (0, 0)


def test_pages_come_back_with_their_rows() -> None:
    """To the end of the list of free ones."""
    stash = Stash(pages=16)
    _, spilled = stash.copied(numbers(100))

    assert stash.popped(numbers(100), spilled) == 2 * 100 * WIDTH
    assert stash.tails.tolist() == [18, 0]


def test_a_full_buffer_sets_the_flag_and_copies_nothing() -> None:
    """Nor does anything afterwards, in either direction."""
    stash = Stash(pages=1)
    moved, spilled = stash.copied(numbers(100))

    assert (moved, stash.overflow.item()) == (0, 1)
    assert stash.heads.tolist() == [0, 0]
    assert stash.copied(numbers(1))[0] == 0
    assert stash.popped(numbers(100), spilled) == 0


def test_what_the_device_has_no_room_for_goes_to_the_host() -> None:
    """The flag of the step says so, and no overflow."""
    stash = Stash(pages=1, of_host=16)
    _, spilled = stash.copied(numbers(100))

    assert stash.heads.tolist() == [0, 2]
    assert (stash.overflow.item(), stash.spill.item(), spilled.item()) == (0, 1, 1)


def test_all_rows_are_copied_where_nobody_counted() -> None:
    """A count that is unknown says nothing."""
    unknown = torch.randint(100, (1,), device="cuda")
    value_policy.forget(unknown)

    assert Stash(pages=16).copied(unknown)[0] == 2 * ROOM * WIDTH


def test_a_buffer_whose_pages_nobody_counted_has_room() -> None:
    """What is not known does not repeat a step."""
    stash = Stash(pages=1)
    value_policy.forget(stash.tails)

    assert stash.copied(numbers(100))[0] == 2 * 100 * WIDTH
    assert stash.overflow.item() == 0


@pytest.mark.parametrize(("module", "name"), [(MODULE, "other"), ("mine", COPY)])
def test_other_kernels_are_not_the_stashs(module: str, name: str) -> None:
    """Their source is followed as that of any kernel."""
    assert not launch_paged_stash(module, name, {})


def test_the_kernels_of_earlier_commits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lay in another module, and their names began with an underscore."""
    monkeypatch.setitem(globals(), "MODULE", "megatron.core.transformer.moe.paged_stash")
    monkeypatch.setitem(globals(), "COPY", f"_{COPY}")

    assert Stash(pages=16).copied(numbers(100))[0] == 2 * 100 * WIDTH
