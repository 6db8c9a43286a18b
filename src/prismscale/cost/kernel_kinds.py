"""The kind of kernel that an operator runs: operators of one kind share a roofline.

Everything that ATen calls elementwise is ``pointwise``, or ``broadcast`` where operands differ in
shape or layout, which costs an index computation for every element. Copies between layouts are
``strided_copy``. Softmax of more than 1,024 elements uses another kernel than softmax of fewer. An
operator that is in no table is ``unknown``: it is costed by the bytes it touches and reported as
such. An operator of a library's stand-in names its kind in its overload; norms of Transformer
Engine (``fused_norm``) read their operands one time fewer than torch's.

A kernel that inductor generates states its kind in its name: ``inductor::triton_poi_fused_mul_0``.
Such a call states its bytes (``traffic_bytes``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from prismscale.cost.kernel_signature import KernelCall

_POINTWISE = """
    __ilshift__ __ixor__ __lshift__ __rshift__ __xor__ __irshift__ __iand__ __ior__ __and__ __or__
    _conj_physical abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu
    clamp clamp_max clamp_min clip complex conj_physical copysign cos cosh deg2rad digamma div
    elu elu_backward eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax
    fmin fmod frac frexp gcd ge gelu gelu_backward glu glu_backward gt hardshrink hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside hypot i0
    igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu
    leaky_relu_backward lerp lgamma log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt
    masked_fill max_pool2d_with_indices maximum minimum mish mish_backward mse_loss_backward mul
    mvlgamma nan_to_num native_dropout_backward ne neg nextafter polar polygamma
    positive pow rad2deg reciprocal relu relu6 remainder renorm round rrelu rsqrt rsub selu sgn
    sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh smooth_l1_loss_backward
    softplus softplus_backward softshrink special_airy_ai special_entr special_erfcx special_i0e
    special_i1 special_i1e special_log_ndtr special_ndtri special_spherical_bessel_j0
    special_xlog1py special_zeta sqrt square sub tan tanh tanh_backward threshold
    threshold_backward tril triu true_divide trunc where xlogy _masked_scale isin
    batch_norm_elemt batch_norm_backward_elemt
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward
    upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_nearest3d upsample_nearest3d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward upsample_linear1d upsample_linear1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_trilinear3d
    upsample_trilinear3d_backward upsample_bicubic2d upsample_bicubic2d_backward
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
    pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d
"""

_TABLE: Mapping[str, str] = {
    "gemm": """mm addmm bmm baddbmm linear _scaled_mm _scaled_mm_v2 _int_mm _addmm_activation
        addbmm matmul _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2""",
    "convolution": """convolution convolution_backward convolution_overrideable cudnn_convolution
        _convolution""",
    "attention": """_scaled_dot_product_flash_attention _flash_attention_forward
        _scaled_dot_product_efficient_attention _efficient_attention_forward
        _scaled_dot_product_cudnn_attention _cudnn_attention_forward
        prismscale_null::flex_attention""",
    "attention_backward": """_scaled_dot_product_flash_attention_backward _flash_attention_backward
        _scaled_dot_product_efficient_attention_backward _efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward
        prismscale_null::flex_attention_backward""",
    "pointwise": _POINTWISE,
    "reduction": """sum mean amax amin max min prod norm linalg_vector_norm var std var_mean
        std_mean argmax argmin any all logsumexp nansum count_nonzero dot vdot mv addmv addr ger
        cross mse_loss smooth_l1_loss l1_loss huber_loss cosine_similarity aminmax median
        binary_cross_entropy binary_cross_entropy_with_logits dist equal native_norm""",
    "dropout": "native_dropout bernoulli dropout",
    "softmax": "_softmax _log_softmax _masked_softmax softmax log_softmax",
    "softmax_backward": "_softmax_backward_data _log_softmax_backward_data",
    "norm": """native_layer_norm native_batch_norm native_group_norm _fused_rms_norm rms_norm
        cudnn_batch_norm _batch_norm_with_update batch_norm_stats layer_norm
        batch_norm_gather_stats_with_counts""",
    "norm_backward": """native_layer_norm_backward native_batch_norm_backward
        native_group_norm_backward _fused_rms_norm_backward cudnn_batch_norm_backward
        batch_norm_backward batch_norm_backward_reduce""",
    "loss": """nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
        _ctc_loss kl_div""",
    "embedding": "embedding _embedding_bag _embedding_bag_forward_only",
    "embedding_backward": "embedding_dense_backward _embedding_bag_dense_backward",
    "index": """index index_select gather take take_along_dim index_put _index_put_impl
        _unsafe_index _unsafe_index_put index_add index_reduce index_copy index_fill scatter
        scatter_add scatter_reduce masked_select masked_scatter nonzero put repeat_interleave roll
        flip bincount histc one_hot searchsorted bucketize""",
    "sort": "sort argsort topk kthvalue msort _unique2 unique_consecutive unique_dim",
    "scan": "cumsum cumprod logcumsumexp cummax cummin",
    "copy": """copy clone cat stack contiguous _to_copy constant_pad_nd repeat tile _copy_from
        _copy_from_and_resize split_with_sizes_copy _chunk_cat slice_scatter select_scatter
        fsdp::chunk_cat_mixed_dtype
        select_backward slice_backward diagonal_scatter as_strided_scatter copy_to alias_copy
        view_copy permute_copy _fsdp_copy fill_diagonal block_diag expand_copy narrow_copy
        split_copy unbind_copy transpose_copy""",
    "fill": """fill zero zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full
        arange range linspace logspace eye normal uniform random exponential geometric log_normal
        cauchy rand randn randint rand_like randn_like randint_like randperm tril_indices
        triu_indices scalar_tensor multinomial empty""",
    "optimizer": "_fused_adam _fused_adamw _fused_sgd _fused_adagrad",
    "view": """view as_strided t transpose permute expand slice select narrow unsqueeze squeeze
        detach alias split split_with_sizes chunk unbind reshape _reshape_alias flatten unflatten
        diagonal empty_strided empty_like empty_permuted new_empty new_empty_strided set resize
        view_as view_as_real view_as_complex lift_fresh _unsafe_view unfold
        movedim swapaxes _conj _neg_view real imag is_same_size record_stream
        _nested_tensor_from_mask unsafe_split unsafe_chunk sym_size _assert_async
        _fused_sdp_choice is_pinned _pin_memory resize_as""",
    "graph_launch": "cuda::graph_launch",
    "compiled_call": "inductor::call",
    "communication_call": "c10d::call",
}
CALLS_OF_THE_HOST = frozenset({"compiled_call", "communication_call"})
"""Kinds of calls of compiled graphs and of communications: what follows them is priced apart."""
HOST_ONLY_KINDS = CALLS_OF_THE_HOST | {"view", "graph_launch"}
"""Kinds of calls that take the host time, and the device none."""

FILL_OF_NEW_MEMORY = "empty"
"""Operator of the launch that fills new memory, which only deterministic programs make; see the
null device's ``csrc/kernels.cpp``."""
GENERATED = "inductor::"
_GENERATED_KINDS = {"poi": "pointwise", "for": "foreach", "tem": "gemm", "spl": "scan"}
"""Kinds by the second word of a generated kernel's name; all others (``red``, ``per``) are
reductions."""

_GENERATED_NAME = re.compile(r"triton_([a-z]{3})_")
_KIND_OF = {name: kind for kind, names in _TABLE.items() for name in names.split()}
STAND_IN_KINDS = frozenset(_TABLE) - CALLS_OF_THE_HOST - {"graph_launch", "convolution"} | {
    "exchange",
    "foreach",
    "foreach_reduction",
    "strided_copy",
    "long_softmax",
    "fused_norm",
    "fused_norm_backward",
}
"""Kinds that the overload of a library's operator may name."""
KINDS = (
    STAND_IN_KINDS | HOST_ONLY_KINDS | {"broadcast", "convolution", "peer", "transfer", "unknown"}
)
"""All kinds of kernels that :func:`kind_of` returns."""
PRODUCT_KINDS = frozenset({"gemm", "convolution"})
"""Kinds that are matrix products."""
_LIST_REDUCTIONS = ("_foreach_norm", "_foreach_max")
_SHORT_SOFTMAX = 1024
"""Most elements that one warp keeps in registers
(aten/src/ATen/native/cuda/PersistentSoftmax.cuh)."""


def is_generated(name: str) -> bool:
    """Return whether inductor generated the kernel, instead of launching one it was given."""
    return _GENERATED_NAME.match(name) is not None


def kind_of(call: KernelCall) -> str:
    """Return the kind of ``call``.

    It is a key of a profile's tables, or ``view``, ``transfer``, ``peer`` or ``unknown``.
    """
    if _crosses_the_bus(call):
        return "transfer"
    if any(tensor.on_peer for tensor in (*call.inputs, *call.outputs)):
        return "peer"
    if call.is_library and call.overload in STAND_IN_KINDS:
        return call.overload
    base = call.base
    if base.startswith(GENERATED) and base not in _KIND_OF:
        generated = _GENERATED_NAME.match(base.removeprefix(GENERATED))
        return _GENERATED_KINDS.get(generated[1] if generated else "", "reduction")
    if base in _KIND_OF:
        return _refined(_KIND_OF[base], call)
    if base.startswith("_foreach_"):
        return "foreach_reduction" if base in _LIST_REDUCTIONS else "foreach"
    if base.startswith("_amp_foreach"):
        return "foreach"
    if base.startswith("special_"):
        return "pointwise"
    return "unknown"


def _refined(kind: str, call: KernelCall) -> str:
    tensors = [t for t in (*call.inputs, *call.outputs) if not t.on_cpu]
    if kind == "pointwise" and len({(t.sizes, t.strides) for t in tensors}) > 1:
        return "broadcast"
    if kind == "copy" and any(t.strides is not None for t in tensors):
        # A copy between equal layouts moves through memory as if both were contiguous.
        is_straight = call.base == "copy" and len({(t.sizes, t.strides) for t in tensors}) == 1
        return "copy" if is_straight else "strided_copy"
    if kind == "softmax" and call.inputs and _width(call) > _SHORT_SOFTMAX:
        return "long_softmax"
    return kind


def _width(call: KernelCall) -> int:
    sizes = call.inputs[0].sizes
    dim = call.arguments.get("dim", (-1,))[0]
    return sizes[dim] if -len(sizes) <= dim < len(sizes) else 1


def _crosses_the_bus(call: KernelCall) -> bool:
    """Return whether the call copies to or from host memory; reading a number counts as a copy.

    Scalar operands of other kernels (``x * 2``) are also marked as on the CPU; only copies move
    them over the bus.
    """
    if call.base == "_local_scalar_dense":
        return True
    return call.base in ("copy", "_copy_from") and any(tensor.on_cpu for tensor in call.inputs)
