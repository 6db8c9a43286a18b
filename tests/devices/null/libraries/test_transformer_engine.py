"""The functions of ``transformer_engine_torch``: what they allocate, keep, and are costed as.

No Python code of the library is needed here: plain tensors alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prismscale.devices.null.libraries.transformer_engine import (
    attention_backends,
    make_extension,
)
from prismscale.devices.null.libraries.transformer_engine.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    block_scales,
    mx_scales,
)
from prismscale.devices.null.libraries.transformer_engine.versions import check_version, is_since
from support import op_log
from support.te_products import gemm

tex: Any = make_extension()
BF16 = torch.bfloat16
NO_MASK = NVTE_Mask_Type["NVTE_NO_MASK"]
WINDOWS_OF_BOTH_SIDES = "NVTE_F16_arbitrary_seqlen" if is_since(2, 13) else "NVTE_No_Backend"


def _empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def test_products_have_the_shapes_of_the_layers() -> None:
    """Forward (TN), gradient of the input (NN), of the weight (NT)."""
    weight, x, grad = _empty(3072, 1024), _empty(512, 2, 1024), _empty(512, 2, 3072)
    assert gemm(weight, True, x, False)[0].shape == (512, 2, 3072)
    assert gemm(weight, False, grad, False)[0].shape == (512, 2, 1024)
    assert gemm(x, False, grad, True)[0].shape == (3072, 1024)
    with pytest.raises(RuntimeError, match="Invalid matrix dimensions"):
        gemm(weight, True, grad, False)


def test_a_product_into_a_given_tensor_allocates_nothing() -> None:
    """As gradients are accumulated into a buffer of float32."""
    x, grad = _empty(512, 1024), _empty(512, 2048)
    buffer = _empty(2048, 1024, dtype=torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, *_ = gemm(x, False, grad, True, out=buffer, accumulate=True, output_dtype=DType.kFloat32)
    assert out is buffer
    assert torch.cuda.max_memory_allocated() - before <= 512, "the workspace alone"


def test_a_backward_product_makes_the_gradient_of_the_bias() -> None:
    """One number a column of the gradient."""
    x, grad, bias = _empty(512, 1024), _empty(512, 2048), _empty(2048)
    _, bias_grad, _, _ = gemm(x, False, grad, True, bias=bias, grad=True)
    assert bias_grad.shape == (2048,)


def test_grouped_products_fill_the_experts_outputs() -> None:
    """One output for each, of its own rows."""
    weights = [_empty(256, 128) for _ in range(3)]
    rows = [_empty(n, 128) for n in (64, 0, 64)]
    out = [_empty(len(x), 256) for x in rows]
    nothing = [_empty(0) for _ in rows]
    tail = (DType.kBFloat16, [64, 0, 64], nothing, DType.kBFloat16, False, nothing, False)
    before = torch.cuda.memory_allocated()
    tex.te_general_grouped_gemm(
        weights, True, rows, False, out, *tail, [_empty(1)], 1, False, False, 132
    )
    assert torch.cuda.memory_allocated() == before


def test_norms_keep_one_number_a_row() -> None:
    """Mean and inverse deviation of LayerNorm, the latter alone of RMSNorm, in float32."""
    x, weight, bias = _empty(64, 2, 512), _empty(512), _empty(512)
    _, mean, deviation = tex.layernorm_fwd(
        x, weight, bias, 1e-5, None, None, DType.kBFloat16, 0, False
    )
    assert [(t.shape, t.dtype) for t in (mean, deviation)] == [((128,), torch.float32)] * 2
    out, nothing, deviation = tex.rmsnorm_fwd(x, weight, 1e-5, None, None, 6, 0, False)
    assert (out.shape, nothing, deviation.shape) == (x.shape, None, (128,))


def test_the_backward_pass_of_a_norm_has_a_workspace_of_partial_sums() -> None:
    """A row of float32 for each of the 132 multiprocessors, which is given back."""
    x, weight = _empty(128, 512), _empty(512)
    deviation = _empty(128, dtype=torch.float32)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = tex.rmsnorm_bwd(x, x, deviation, weight, 0, False)
    assert torch.cuda.memory_allocated() - before == x.nbytes + weight.nbytes
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == x.nbytes + weight.nbytes + 132 * 512 * 4
    assert len(kept) == 2


def test_gated_activations_halve_the_last_dimension() -> None:
    """And their gradients double it again."""
    x = _empty(16, 256)
    assert tex.swiglu(x, None).shape == (16, 128)
    assert tex.gelu(x, None).shape == (16, 256)
    assert tex.dswiglu(_empty(16, 128), x, None).shape == (16, 256)
    assert tex.clamped_dswiglu(_empty(16, 128), x, None).shape == (16, 256)


def _attention_arguments(q: torch.Tensor, k: torch.Tensor, layout: str) -> dict[str, Any]:
    ends = torch.zeros(q.shape[1] + 1, dtype=torch.int32, device="cuda")
    return {
        "lengths": (q.shape[0], k.shape[0]),
        "options": (0.1, 0.0, False, NVTE_QKV_Layout[f"NVTE_{layout}"]),
        "kinds": (
            NVTE_Bias_Type["NVTE_NO_BIAS"],
            NVTE_Mask_Type["NVTE_CAUSAL_MASK"],
            NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"],
            [-1, 0],
        ),
        "ends": (ends, ends),
    }


def test_fused_attention_keeps_one_number_a_row_of_scores() -> None:
    """And the random state; nothing of the size of the scores."""
    q, k = _empty(1024, 2, 16, 64), _empty(1024, 2, 4, 64)
    given = _attention_arguments(q, k, "SBHD_SBHD_SBHD")
    out, statistics, state = tex.fused_attn_fwd(
        *given["lengths"],
        True,
        *given["options"],
        *given["kinds"],
        *given["ends"],
        *(q, k, k, BF16),
        *[None] * 9,
        *(0, False, False),
    )
    assert out.shape == q.shape
    assert (statistics.shape, statistics.dtype) == ((2, 16, 1024, 1), torch.float32)
    assert (state.shape, state.dtype) == ((2,), torch.int64)


def test_gradients_lie_as_the_projection_wrote_queries_keys_and_values() -> None:
    """In one tensor, so that the projection's backward pass needs no copy."""
    q, k, v = _empty(64, 2, 16, 3, 64).unbind(3)
    given = _attention_arguments(q, k, "SBH3D")
    dq, dk, dv, _, _ = tex.fused_attn_bwd(
        *given["lengths"],
        *given["options"],
        *given["kinds"],
        False,
        *given["ends"],
        *(q, k, v, q, q, BF16, DType.kBFloat16, [_empty(8)]),
        *[None] * 5,
        False,
    )
    assert dq.untyped_storage()._cdata == dv.untyped_storage()._cdata
    assert dq.stride() == dk.stride() == q.stride()


def test_a_list_of_arguments_that_nobody_knows_is_refused() -> None:
    """With the lengths that are known."""
    with pytest.raises(NotImplementedError, match="25, 27, 28, 29, 30, 32"):
        tex.fused_attn_fwd(1, 2, 3)


def _choose(**given: Any) -> str:
    call = attention_backends.AttentionCall(
        **{
            "is_training": True,
            "dtype": DType.kBFloat16,
            "layout": NVTE_QKV_Layout["NVTE_SBHD_SBHD_SBHD"],
            "bias": NVTE_Bias_Type["NVTE_NO_BIAS"],
            "mask": NVTE_Mask_Type["NVTE_CAUSAL_MASK"],
            "softmax": NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"],
            "dropout": 0.0,
            "heads": 32,
            "groups": 8,
            "length": 4096,
            "keys": 4096,
            "head_size": 128,
            "value_size": 128,
            "window": (-1, 0),
            "wants_max_logit": False,
            "arch": 90,
            "cudnn": 91501,
            "is_deterministic": False,
        }
        | given
    )
    return str(attention_backends.choose(call).name)


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, "NVTE_F16_arbitrary_seqlen"),
        ({"dtype": DType.kFloat32}, "NVTE_No_Backend"),
        ({"dtype": DType.kFloat8E4M3}, "NVTE_FP8"),
        ({"dtype": DType.kFloat8E4M3, "head_size": 64, "value_size": 64}, "NVTE_No_Backend"),
        ({"head_size": 192}, "NVTE_F16_arbitrary_seqlen"),
        ({"head_size": 256, "value_size": 256}, "NVTE_F16_arbitrary_seqlen"),
        ({"head_size": 256, "value_size": 256, "arch": 80}, "NVTE_No_Backend"),
        ({"window": (1024, 0)}, "NVTE_F16_arbitrary_seqlen"),
        ({"window": (1024, 1024)}, "NVTE_No_Backend"),
        ({"window": (1024, 1024), "mask": NO_MASK}, WINDOWS_OF_BOTH_SIDES),
        ({"layout": NVTE_QKV_Layout["NVTE_THD_THD_THD"]}, "NVTE_No_Backend"),
        ({"arch": 100, "dtype": DType.kFloat8E4M3, "head_size": 192}, "NVTE_No_Backend"),
        (
            {"arch": 100, "dtype": DType.kFloat8E4M3, "head_size": 192, "cudnn": 92400},
            "NVTE_FP8",
        ),
        ({"arch": 100, "is_deterministic": True}, "NVTE_No_Backend"),
        ({"arch": 100, "is_deterministic": True, "cudnn": 91801}, "NVTE_F16_arbitrary_seqlen"),
        ({"arch": 100, "head_size": 256, "value_size": 256}, "NVTE_No_Backend"),
        (
            {"arch": 100, "head_size": 256, "value_size": 256, "cudnn": 92300},
            "NVTE_F16_arbitrary_seqlen",
        ),
        ({"wants_max_logit": True}, "NVTE_No_Backend"),
        ({"wants_max_logit": True, "cudnn": 92100}, "NVTE_F16_arbitrary_seqlen"),
    ],
)
def test_cudnn_takes_what_its_version_can(given: dict[str, Any], backend: str) -> None:
    """Causal attention of 16 bits with heads of 128 on Hopper, and what differs from it."""
    assert NVTE_Fused_Attn_Backend[backend].name == _choose(**given)


def test_scales_of_blocks_are_padded_for_the_tensor_cores() -> None:
    """128 × 4 tiles of MXFP8's; multiples of 4 of the float32 ones."""
    assert mx_scales(1000, 512, columnwise=False) == (1024, 16)
    assert mx_scales(1024, 500, columnwise=True) == (32, 512)
    assert block_scales(1000, 512, columnwise=False, dims=1, compact=False) == (4, 1000)
    assert block_scales(1001, 512, columnwise=False, dims=1, compact=False) == (4, 1004)
    assert block_scales(1001, 512, columnwise=False, dims=1, compact=True) == (1001, 4)
    assert block_scales(1000, 512, columnwise=True, dims=2, compact=False) == (4, 8)


def test_adam_updates_lists_in_as_few_launches_as_the_library() -> None:
    """Four lists: 36 tensors or 320 chunks in each."""
    from prismscale.devices.null.libraries.multi_tensor import launches_of

    small = [[_empty(8) for _ in range(73)]] * 4
    assert launches_of(small, 65_536) == 3
    large = [[_empty(65_536 * 321)]] * 4
    assert launches_of(large, 65_536) == 2


def test_the_norm_of_gradients_is_one_number() -> None:
    """And, if asked, one for each tensor."""
    noop = torch.zeros(1, dtype=torch.int32, device="cuda")
    grads = [_empty(1000), _empty(300)]
    total, each = tex.multi_tensor_l2norm(65_536, noop, [grads], True)
    assert (total.shape, each.shape) == ((1,), (2,))
    assert tex.multi_tensor_l2norm(65_536, noop, [grads], False)[1].numel() == 0


def test_the_router_writes_the_gradient_where_it_is_asked_to() -> None:
    """From 2.13 on the caller has made it."""
    logits = _empty(128, 8)
    probs, routes, kept = tex.fused_topk_with_score_function_fwd(logits=logits, topk=2)
    assert (probs.shape, routes.dtype) == ((128, 8), torch.bool)
    given = {"routing_map": routes, "intermediate_output": kept, "grad_probs": probs}
    assert tex.fused_topk_with_score_function_bwd(**given, topk=2).shape == logits.shape
    grad = _empty(128, 8)
    before = torch.cuda.memory_allocated()
    tex.fused_topk_with_score_function_bwd(**given, grad_logits=grad, topk=2)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", ["topk_with_score_function", "score_for_moe_aux_loss"])
def test_experts_of_the_fused_router_get_their_share_of_tokens(name: str) -> None:
    """As those of torch's own operators do: programs size their exchanges by the counts."""
    _, routes, _ = getattr(tex, f"fused_{name}_fwd")(_empty(128, 8), 2, False)
    assert routes.sum(dim=0).long().tolist() == [128 * 2 // 8] * 8


def test_the_routers_tensors_are_found_by_position() -> None:
    """Numbers stand before them up to 2.16, the gradient beside them from 2.13 on."""
    logits, routes = _empty(128, 8), _empty(128, 8, dtype=torch.bool)
    kept, probs = _empty(128, 8, dtype=torch.float32), _empty(128, 8)
    old = (128, 8, routes, kept, probs, 2, False, 1.0, "softmax")
    assert tex.fused_topk_with_score_function_bwd(*old).shape == logits.shape
    for sizes in ((128, 8), ()):
        new = (*sizes, routes, kept, probs, logits, 2, False, 1.0, "softmax")
        assert tex.fused_topk_with_score_function_bwd(*new) is logits


def test_experts_elements_begin_where_their_splits_say() -> None:
    """One offset more than there are experts, or as many as there are."""
    splits = torch.ones(4, dtype=torch.int64, device="cuda")
    assert tex.splits_to_offsets(splits, 64).shape == (5,)
    _, offsets = tex.splits_to_offsets_multi(
        splits,
        splits.device,
        strides=[1, 64],
        include_leading_zero=[True, False],
        dtypes=[torch.int64, torch.int32],
    )
    assert [(o.numel(), o.dtype) for o in offsets] == [(5, torch.int64), (4, torch.int32)]


def test_a_map_of_routes_may_have_a_bit_an_expert() -> None:
    """Eight experts in a byte."""
    _, routes, _ = tex.fused_score_for_moe_aux_loss_fwd(
        logits=_empty(128, 20), topk=2, routing_map_format=1
    )
    assert (routes.shape, routes.dtype) == ((128, 3), torch.uint8)


def test_permuted_tokens_come_with_their_places() -> None:
    """Each token as often as it has experts; the workspace is used again."""
    tokens = _empty(128, 64)
    indices = torch.zeros(128, 2, dtype=torch.int32, device="cuda")
    permuted, places, workspace = tex.moe_permute_fwd(tokens, 6, indices, 0, [], 256)
    assert (permuted.shape, places.shape) == ((256, 64), (256,))
    *_, again = tex.moe_permute_fwd(tokens, 6, indices, 0, workspace, 256)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in workspace]


def test_packed_sequences_are_halved_over_ranks() -> None:
    """A rank of context parallelism has two parts of every sequence, and sends one of them."""
    starts = _empty(3, dtype=torch.int32)
    keys, values = _empty(64, 4, 128), _empty(2, 64, 4, 128)

    assert tex.thd_read_half_tensor(keys, starts, 0).shape == (32, 4, 128)
    assert tex.thd_read_half_tensor(values, starts, 1).shape == (2, 32, 4, 128)
    assert tex.thd_get_partitioned_indices(starts, 64, 4, 1).shape == (16,)
    assert tex.thd_get_partitioned_indices(starts, 64, 4, 1).dtype == torch.int32


def test_exchanges_of_packed_sequences_are_added_in_place() -> None:
    """Corrections of output, row sums and gradients allocate nothing."""
    starts, sums = _empty(3, dtype=torch.int32), _empty(4, 64, dtype=torch.float32)
    half = tex.thd_read_second_half_lse(sums, starts, True, 32)
    out, part = _empty(64, 4, 128), _empty(32, 4, 128)
    before = torch.cuda.memory_allocated()

    tex.thd_second_half_lse_correction(sums, half, starts, True)
    tex.thd_out_correction(out, part, sums, half, starts, True, True)
    tex.thd_grad_correction(out, part, starts, "none", "add")

    assert half.shape == (4, 32)
    assert torch.cuda.memory_allocated() == before


def test_what_is_left_out_says_so_when_it_is_called() -> None:
    """Its name is there, because the library's Python code imports it."""
    with pytest.raises(NotImplementedError, match="init_nvshmem_backend"):
        tex.init_nvshmem_backend()


def test_a_version_that_the_stand_in_does_not_know_is_refused() -> None:
    """With the way out; it does not look like a library that is not installed."""
    check_version("2.2.0")
    check_version("2.20.2")
    with pytest.raises(NotImplementedError, match=r"2\.2 to 2\.20; installed is 2\.21\.0"):
        check_version("2.21.0")


@pytest.mark.parametrize(("other", "bits"), [(torch.float32, 19), (BF16, 16)])
def test_products_of_32_bits_alone_are_in_tf32(other: torch.dtype, bits: int) -> None:
    """As a router in float32 multiplies in its backward pass."""
    x, grad = _empty(512, 1024, dtype=torch.float32), _empty(512, 256, dtype=other)
    found = op_log.ops_of(lambda: gemm(x, False, grad, True, output_dtype=DType.kFloat32))
    (product,) = (o.signature for o in found if "generic_gemm" in o.signature.name)
    assert product.arguments.get("bits", (16,)) == (bits,)
