"""Which matrix products a call runs."""

from __future__ import annotations

import pytest

from prismscale.cost.kernel_gemm import products_of
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_signature import parse_signature
from support.kernel_prices import text


def extents(signature: str) -> list[tuple[int, int, int, int]]:
    """Batch, M, N and K of each product."""
    return [(p.batch, p.m, p.n, p.k) for p in products_of(parse_signature(signature))]


@pytest.mark.parametrize("name", ["_scaled_mm", "_scaled_mm_v2"])
def test_two_4_bit_numbers_are_one_element(name: str) -> None:
    """The inner extent of the shapes is half of what is multiplied."""
    packed = "Float4_e2m1fn_x2"
    call = text(name, f"{packed}[512,64];{packed}[64,256]", "BFloat16[512,256]")
    assert kind_of(parse_signature(call)) == "gemm"
    assert extents(call) == [(1, 512, 256, 128)]


@pytest.mark.parametrize("name", ["_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
@pytest.mark.parametrize(
    ("first", "second", "out", "found"),
    [
        ("[4096,64]", "[8,64,32]", "[4096,32]", (8, 512, 32, 64)),
        ("[8,32,64]", "[64,4096]", "[32,4096]", (8, 32, 512, 64)),
        ("[32,4096]", "[4096,64]", "[8,32,64]", (8, 32, 64, 512)),
        ("[8,32,64]", "[8,64,16]", "[8,32,16]", (8, 32, 16, 64)),
    ],
)
def test_groups_share_rows_columns_or_inner_elements(
    name: str, first: str, second: str, out: str, found: tuple[int, int, int, int]
) -> None:
    """By which of the factors has an extent for the groups."""
    inputs = f"BFloat16{first};BFloat16{second};Int[8]"
    assert extents(text(name, inputs, f"BFloat16{out}")) == [found]


def test_products_that_are_summed_into_one_are_all_counted() -> None:
    """``addbmm`` has no batch in its result."""
    inputs = "Half[16,32];Half[64,16,8];Half[64,8,32]"
    assert extents(text("addbmm", inputs, "Half[16,32]")) == [(64, 16, 32, 8)]


@pytest.mark.parametrize(
    ("outputs", "products"),
    [
        ("Half[2,3,8,8];Half[6,3,2,2];Half[6]", 2),
        ("Half[6,3,2,2];Half[6]", 1),
        ("Half[6]", 0),
    ],
)
def test_only_gradients_that_are_wanted_are_products(outputs: str, products: int) -> None:
    """The first layer needs none of its input, and that of the bias is a sum."""
    inputs = "Half[2,6,4,4];Half[2,3,8,8];Half[6,3,2,2]"
    call = text("convolution_backward", inputs, outputs, "transposed=0")
    assert extents(call) == [(1, 2 * 4 * 4, 6, 3 * 2 * 2)] * products


def test_a_transposed_convolution_is_one_the_other_way() -> None:
    """As many operations as the convolution that goes from its result to its input."""
    small, large, weight = "Half[2,6,4,4]", "Half[2,3,8,8]", "Half[6,3,2,2]"
    there = text("convolution", f"{large};{weight}", small, "transposed=0")
    back = text("convolution", f"{small};{weight}", large, "transposed=1")
    assert extents(back) == extents(there)
    gradient = text(
        "convolution_backward", f"{large};{small};{weight}", f"{small};{weight}", "transposed=1"
    )
    assert extents(gradient) == extents(there) * 2
