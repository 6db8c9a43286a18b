"""Arithmetic in place, a block at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from prismscale.payload.arithmetic import BLOCK_NUMEL, KIND, accumulate, divide, reduce_copies

FLOAT8 = torch.float8_e4m3fn
NUMEL = 5 * BLOCK_NUMEL + 3


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that is made meanwhile."""

    n_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in (result,) if isinstance(result, torch.Tensor) else result or ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.n_bytes = max(self.n_bytes, storage.nbytes())
        return result


def columns(numel: int) -> torch.Tensor:
    """Small 8-bit floats, whose memory is not in the order of their indices."""
    return (torch.arange(2 * numel) % 7).float().to(FLOAT8).view(numel, 2).t()


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_summing_large_8_bit_floats_holds_no_more_than_a_block(contiguous: bool) -> None:
    """The program's memory peak is measured, and it must not be ours."""
    total, term = columns(NUMEL), columns(NUMEL)
    if contiguous:
        total, term = total.contiguous(), term.contiguous()
    expected = (total.float() + 2 * term.float()).to(FLOAT8).float()
    with LargestAllocation() as largest:
        accumulate(total, term, KIND.SUM, 2)
    assert torch.equal(total.float(), expected)
    assert 0 < largest.n_bytes <= BLOCK_NUMEL * torch.float32.itemsize


def test_scaling_large_8_bit_floats_holds_no_more_than_a_block() -> None:
    """Also where they are strided."""
    tensor = columns(NUMEL)
    expected = (3 * tensor.float()).to(FLOAT8).float()
    with LargestAllocation() as largest:
        reduce_copies(tensor, None, 3)
    assert torch.equal(tensor.float(), expected)
    assert 0 < largest.n_bytes <= BLOCK_NUMEL * torch.float32.itemsize


QUOTIENTS: list[tuple[torch.dtype, list[float], list[float]]] = [
    (torch.int64, [7, -7, 6], [2, -2, 2]),
    (torch.uint8, [255, 7], [85, 2]),
    (torch.uint16, [60_000, 7], [20_000, 2]),
    (torch.uint32, [4_000_000_000, 7], [1_333_333_333, 2]),
    (torch.bool, [1, 0], [1, 0]),
    (FLOAT8, [9, 6], [3, 2]),
    (torch.float32, [9, 1.5], [3, 0.5]),
    (torch.complex64, [9, 6], [3, 2]),
]


@pytest.mark.parametrize(("dtype", "sums", "expected"), QUOTIENTS, ids=str)
def test_an_average_is_of_the_sums_kind(
    dtype: torch.dtype, sums: list[float], expected: list[float]
) -> None:
    """Integers are cut towards 0, also those beyond the signed numbers of their size."""
    total = torch.tensor(sums, dtype=torch.float64).to(dtype)
    divide(total, 3)
    assert total.to(torch.complex128).real.tolist() == expected


@given(st.lists(st.integers(-(2**24), 2**24), min_size=1), st.integers(1, 9))
def test_an_average_is_rounded_once(sums: list[int], size: int) -> None:
    """As a division is; the reciprocal of 3 is rounded itself."""
    total = torch.tensor(sums, dtype=torch.float32)
    expected = (total.double() / size).float()
    divide(total, size)
    assert torch.equal(total, expected)
