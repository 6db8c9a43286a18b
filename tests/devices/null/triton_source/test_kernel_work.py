"""What Triton kernels compute and move, read off their source."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismscale.devices.null import value_policy
from prismscale.devices.null.triton_source.kernel_work import Work, work_of
from prismscale.devices.null.triton_source.tally import Tally
from support import triton_kernels as kernels


def cuda(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor whose values are not known."""
    return torch.empty(*sizes, dtype=dtype, device="cuda")


def product(m: int, n: int, k: int, tile: tuple[int, int, int], **named: Any) -> Work:
    """Of the matmul kernel."""
    dtype = named.get("dtype", torch.bfloat16)
    bm, bn, bk = tile
    arguments = {
        "a": cuda(m, k, dtype=dtype),
        "b": cuda(k, n, dtype=dtype),
        "c": cuda(m, n, dtype=dtype),
        "M": m,
        "N": n,
        "K": k,
        "PRECISION": named.get("precision", "tf32"),
        "BM": bm,
        "BN": bn,
        "BK": bk,
    }
    found = work_of(kernels.matmul, arguments, (ceil(m / bm) * ceil(n / bn),))
    assert found is not None
    return found


@given(
    sizes=st.tuples(*[st.integers(1, 1000)] * 3),
    tile=st.tuples(*[st.sampled_from((16, 32, 64, 128))] * 3),
)
def test_a_product_is_as_large_as_its_tiles(
    sizes: tuple[int, int, int], tile: tuple[int, int, int]
) -> None:
    """Tiles count whole, whatever the masks; small ones are put together."""
    batch, m, n, k = product(*sizes, tile).cost.extents
    padded = [ceil(size / step) * step for size, step in zip(sizes, tile, strict=True)]
    # K in whole steps.
    assert k == pytest.approx(padded[0] * padded[1] * padded[2] / (batch * m * n), abs=0.5)
    assert (m, n) == (max(64, tile[0]), max(64, tile[1]))


@pytest.mark.parametrize(
    ("dtype", "precision", "bits"),
    [
        (torch.bfloat16, "tf32", 16),
        (torch.float8_e4m3fn, "tf32", 8),
        (torch.float32, "tf32", 19),
        (torch.float32, "ieee", 32),
    ],
)
def test_a_product_is_of_the_bits_that_it_multiplies(
    dtype: torch.dtype, precision: str, bits: int
) -> None:
    """Triton multiplies floats of 32 bits in 19, unless it is told not to."""
    work = product(128, 128, 64, (64, 64, 32), dtype=dtype, precision=precision)
    assert work.cost.bits == bits
    assert (work.reads, work.writes) == ((0, 1), (2,))


def test_programs_that_loop_more_often_count_more() -> None:
    """Half of the square under a causal mask, from five of its 64 rows of tiles."""
    arguments = {
        "q": cuda(4096, 128),
        "k": cuda(4096, 128),
        "out": cuda(4096, 64),
        "length": 4096,
        "D": 128,
        "B": 64,
    }
    work = work_of(kernels.causal, arguments, (64,))
    assert work is not None
    batch, m, n, k = work.cost.extents
    assert batch * m * n * k == pytest.approx(4096 * 4096 * 128 / 2, rel=0.03)


def test_a_long_loop_counts_all_its_turns() -> None:
    """Of which a few are followed: these are more than operations that are followed at all."""
    work = product(64, 64, 16 * 30_001, (64, 64, 16))
    assert work.cost.extents == (1, 64, 64, 16 * 30_001)


def test_a_loop_within_a_loop_counts_all_its_turns() -> None:
    """Rows of tiles under a causal mask, one program for all of them."""
    arguments = {"q": cuda(64, 16), "k": cuda(64, 16), "out": cuda(64), "turns": 100, "B": 16}
    work = work_of(kernels.nested, arguments, (1,))
    assert work is not None
    assert work.cost.extents == (1, 64, 64, 16 * 100 * 200 * 16 * 16 // 64**2)


def test_what_is_read_and_written_in_place_crosses_the_bus_twice() -> None:
    """Once at most in each direction, though the last block is larger than what is left."""
    x = cuda(1000, dtype=torch.float32)
    work = work_of(kernels.double, {"x": x, "count": 1000, "B": 512}, (2,))
    assert work is not None
    assert (work.cost.kind, work.cost.extents) == ("pointwise", (8000,))


def test_a_table_costs_the_rows_that_are_read() -> None:
    """Guards on numbers that nobody knows let the programs work."""
    arguments = {
        "table": cuda(1_000_000, 128),
        "rows": cuda(32, dtype=torch.int32),
        "out": cuda(32, 128),
        "count_ptr": cuda(1, dtype=torch.int32),
        "WIDTH": 128,
    }
    work = work_of(kernels.gathered, arguments, (32,))
    assert work is not None
    assert work.cost.kind == "index"
    assert work.cost.extents == (2 * 32 * 128 * 2 + 32 * 4 + 4,)
    assert (work.reads, work.writes) == ((0, 1, 3), (2,))


def test_a_guard_on_a_number_that_is_known_holds() -> None:
    """Programs past the count do nothing."""
    arguments = {
        "table": cuda(1_000_000, 128),
        "rows": cuda(32, dtype=torch.int32),
        "out": cuda(32, 128),
        "count_ptr": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "WIDTH": 128,
    }
    assert value_policy.known(arguments["count_ptr"]) is not None
    work = work_of(kernels.gathered, arguments, (32,))
    assert work is not None
    assert (work.cost.extents, work.writes) == ((4,), ())


def test_a_sum_is_a_reduction() -> None:
    """Of each row; its exponentials follow no product."""
    work = work_of(kernels.row_sums, {"x": cuda(64, 256), "out": cuda(64), "WIDTH": 256}, (64,))
    assert work is not None
    assert (work.cost.kind, work.cost.extents) == ("reduction", (64 * 256 * 2 + 64 * 2,))


def test_a_loop_as_long_as_a_tensor_says_is_followed_where_that_is_known() -> None:
    """And where it is not, the kernel's work is not."""
    arguments = {"x": cuda(1024), "out": cuda(1024), "B": 128}
    known = torch.tensor([3], dtype=torch.int32, device="cuda")
    work = work_of(kernels.as_often, arguments | {"times": known}, (1,))
    assert work is not None
    assert work.cost.extents == (2 * 3 * 128 * 2 + 4,)
    assert work_of(kernels.as_often, arguments | {"times": known + cuda(1)}, (1,)) is None


def test_a_loop_that_waits_for_a_value_is_given_up() -> None:
    """It would never end."""
    assert work_of(kernels.unending, {"x": cuda(1, dtype=torch.int32)}, (1,)) is None


def test_tensors_are_read_through_descriptors() -> None:
    """As wide as their blocks."""
    arguments = {"a": cuda(64, 32), "b": cuda(32, 64), "c": cuda(64, 64), "M": 64, "N": 64, "K": 32}
    work = work_of(kernels.described, arguments, (1,))
    assert work is not None
    assert work.cost.extents == (1, 64, 64, 32)
    assert (work.reads, work.writes) == ((0, 1), (2,))


def test_products_of_tensors_that_are_known_by_address_are_counted() -> None:
    """Their sizes are small integers, which the device knows."""
    addresses = cuda(2, dtype=torch.int64)
    arguments = {
        "a_addresses": addresses,
        "b_addresses": addresses,
        "c_addresses": addresses,
        "sizes": torch.tensor([128, 256, 64, 64, 64, 640], dtype=torch.int32, device="cuda"),
        "GROUPS": 2,
        "B": 64,
    }
    work = work_of(kernels.grouped, arguments, (3,))
    assert work is not None
    batch, m, n, k = work.cost.extents
    assert batch * m * n * k == 128 * 256 * 64 + 64 * 64 * 640
    assert (work.reads, work.writes) == ((0, 1, 2, 3), ())


def test_exponentials_of_a_batch_of_tiles_count_for_each_tile() -> None:
    """As their products do."""
    one, batch = Tally(), Tally()
    one.product((16, 32), 64, 16)
    one.exponential((16, 32))
    batch.product((4, 16, 32), 64, 16)
    batch.exponential((4, 16, 32))
    assert batch.products[16, 32, 16] == 4 * one.products[16, 32, 16]
