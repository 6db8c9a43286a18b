"""cuDNN frontend's fused products of experts: what they make, and of how many rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.cudnn_frontend import stand_in
from prismscale.devices.null.libraries.transformer_engine.grouped_mlp import (
    get_device_pointer_for_data_and_scales,
)
from support import op_log

ROWS, INNER, COLUMNS, EXPERTS = 1024, 256, 512, 4
"""Rows that a buffer has room for; extents of the weights."""
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture
def cudnn() -> Any:
    """The library with what stands in for its products."""
    module = SimpleNamespace(anything_else=1)
    with stand_in().around["cudnn"](module):
        pass
    return module


def ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32)


def given(offsets: torch.Tensor, *, n: int = COLUMNS, dtype: torch.dtype = FP8) -> dict[str, Any]:
    """Arguments of a product, as Transformer Engine gives them."""
    return {
        "a_tensor": torch.empty(ROWS, INNER, 1, dtype=FP8, device="cuda"),
        "padded_offsets": offsets,
        "n": n,
        "c_dtype": BF16,
        "d_dtype": dtype,
        "sf_vec_size": 32,
    }


def extents_of(call: Any) -> tuple[int, ...]:
    """Products of the one kernel that a call launches."""
    (record,) = op_log.ops_of(call)
    return tuple(record.signature.arguments["extents"])


def test_experts_have_the_rows_that_the_device_counts(cudnn: Any) -> None:
    """Not the room of the buffer; one without rows costs nothing."""
    product = cudnn.grouped_gemm_quant_wrapper_sm100
    out = torch.empty(ROWS, COLUMNS, 1, dtype=BF16, device="cuda")
    uneven = given(ends(128, 0, 256, 128))

    assert extents_of(lambda: product(**uneven, d_tensor=out)) == (
        *(1, 128, COLUMNS, INNER),
        *(1, 256, COLUMNS, INNER),
        *(1, 128, COLUMNS, INNER),
    )


def test_even_experts_are_one_batch(cudnn: Any) -> None:
    """So are those whose rows nobody knows."""
    product, unknown = cudnn.grouped_gemm_quant_wrapper_sm100, ends(1, 1, 1, 1)
    value_policy.forget(unknown)

    for offsets in (ends(*[256] * EXPERTS), unknown):
        call = given(offsets, dtype=BF16)
        assert extents_of(lambda call=call: product(**call)) == (EXPERTS, 256, COLUMNS, INNER)


def test_a_gated_activation_halves_the_result_and_quantises_it_both_ways(cudnn: Any) -> None:
    """With scales in the order of the tensor cores, which callers put back in rows."""
    made = cudnn.grouped_gemm_glu_wrapper_sm100(**given(ends(*[256] * EXPERTS)))
    half = COLUMNS // 2

    assert made["c_tensor"].shape == (ROWS, COLUMNS, 1)
    assert made["c_tensor"].view(ROWS, COLUMNS).is_contiguous()
    assert made["d_tensor"].shape == made["d_col_tensor"].shape == (ROWS, half, 1)
    for name in ("sfd_row_tensor", "sfd_col_tensor"):
        scales = made[name].permute(5, 2, 4, 0, 1, 3)
        assert scales.is_contiguous()
        assert scales.numel() == ROWS * half // 32


def test_4_bit_layers_get_16_bits_and_their_largest_values(cudnn: Any) -> None:
    """They quantise the result themselves."""
    asked = given(ends(*[256] * EXPERTS), dtype=BF16)
    made = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(**asked, act_func="swiglu")

    assert made["d_tensor"].dtype == BF16
    assert "d_col_tensor" not in made
    assert made["amax_tensor"].numel() == made["post_rht_amax_tensor"].numel() == EXPERTS


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_gradient_of_an_activation_is_as_wide_as_its_input(cudnn: Any, has_bias: bool) -> None:
    """And the gradient of the probabilities is the caller's."""
    dprob = torch.zeros(ROWS, 1, 1, device="cuda")
    made = cudnn.grouped_gemm_dglu_wrapper_sm100(
        **given(ends(*[256] * EXPERTS), n=COLUMNS // 2),
        c_tensor=torch.empty(ROWS, COLUMNS, 1, dtype=BF16, device="cuda"),
        dprob_tensor=dprob,
        generate_dbias=has_bias,
    )

    assert made["d_row_tensor"].shape == (ROWS, COLUMNS, 1)
    assert made["dprob_tensor"] is dprob
    assert (made["dbias_tensor"] is not None) == has_bias


def test_a_squared_relu_may_be_computed_again(cudnn: Any) -> None:
    """Its result comes with the gradient."""
    made = cudnn.grouped_gemm_dsrelu_wrapper_sm100(
        **given(ends(*[256] * EXPERTS)),
        c_tensor=torch.empty(ROWS, COLUMNS, 1, dtype=BF16, device="cuda"),
        dprob_tensor=torch.zeros(ROWS, 1, 1, device="cuda"),
        use_dsrelu_reuse=True,
    )

    assert made["d_srelu_tensor"].shape == (ROWS, COLUMNS, 1)
    assert made["sfd_col_d_srelu_tensor"].numel() == ROWS * COLUMNS // 32


def test_gradients_of_weights_are_sums_over_an_experts_rows(cudnn: Any) -> None:
    """Of as many as the device counts."""
    dy = torch.empty(COLUMNS, ROWS, dtype=FP8, device="cuda")
    x = torch.empty(ROWS, INNER, dtype=FP8, device="cuda")
    product, offsets = cudnn.grouped_gemm_wgrad_wrapper_sm100, ends(*[128] * EXPERTS)

    assert extents_of(lambda: product(a_tensor=dy, b_tensor=x, offsets_tensor=offsets)) == (
        EXPERTS,
        COLUMNS,
        INNER,
        128,
    )


def test_the_rest_of_the_library_is_its_own(cudnn: Any) -> None:
    """Products alone are replaced."""
    assert cudnn.anything_else == 1


@pytest.mark.parametrize("swizzle", [True, False])
def test_transformer_engine_collects_the_addresses_of_weights_and_scales(swizzle: bool) -> None:
    """One of each expert; scales in the tensor cores' order lie in a buffer of their own."""
    weights = [
        torch.empty(COLUMNS, INNER, dtype=torch.uint8, device="cuda") for _ in range(EXPERTS)
    ]
    scales = [torch.empty(COLUMNS, INNER // 32, dtype=torch.uint8, device="cuda")] * EXPERTS
    given = {"swizzle": swizzle, "rowwise": True, "data_dtype": None}
    *addresses, buffer = get_device_pointer_for_data_and_scales(weights, scales, **given)
    assert [(a.dtype, a.shape) for a in addresses] == [(torch.int64, (EXPERTS,))] * 2
    assert buffer.numel() == (EXPERTS * scales[0].numel() if swizzle else 0)
