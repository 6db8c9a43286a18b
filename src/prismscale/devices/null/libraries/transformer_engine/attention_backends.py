"""Choice of the cuDNN backend of fused attention that takes a call, for cuDNN 9.15 and newer.

The cuDNN is the one that torch brings. Source: common/fused_attn/fused_attn.cpp of Transformer
Engine 2.11 to 2.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prismscale.devices.null.libraries.transformer_engine.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
    formats_of,
)
from prismscale.devices.null.libraries.transformer_engine.versions import is_since
from prismscale.torch_versions import installed_cudnn

_CAUSAL = (2, 3, 4, 5)
_PADDING = (1, 3, 5)
_BOTTOM_RIGHT = (4, 5)
_FULL_WINDOW = (-1, -1)
_HOPPER, _BLACKWELL = 90, 100
_9_18_1, _9_21, _9_23, _9_25 = 91801, 92100, 92300, 92500


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """Properties of a call on which the choice depends."""

    is_training: bool
    dtype: DType
    layout: Any
    bias: Any
    mask: Any
    softmax: Any
    dropout: float
    heads: int
    groups: int
    length: int
    keys: int
    head_size: int
    value_size: int
    window: tuple[int, int]
    wants_max_logit: bool
    arch: int
    """Compute capability: 10 × major + minor."""
    cudnn: int
    """Version of cuDNN: 9.15.1 is 91501."""
    is_deterministic: bool

    @property
    def format(self) -> str:
        """Format of the queries: ``sbhd``, ``bshd`` or ``thd``."""
        return formats_of(self.layout)[0]


_POSITIONS = (
    *("is_training", "q_dtype", "kv_dtype", "layout", "bias", "mask", "softmax", "dropout"),
    *("heads", "groups", "length", "keys", "head_size", "value_size"),
    *("window_left", "window_right", "wants_max_logit", "in_cuda_graph", "is_deterministic"),
)
"""Names of the arguments from 2.8 to 2.19, by position; earlier versions lack the last ones."""
_NOT_YET = {14: ("is_training", "softmax"), 15: ("softmax",)}
"""Other arguments that earlier versions lack, by the number of arguments that they take."""
_FIELDS = (
    *("is_training", "qkv_dtype", "qkv_dtype", "qkv_layout", "bias_type", "attn_mask_type"),
    *("softmax_type", "dropout", "num_attn_heads", "num_gqa_groups", "max_seqlen_q"),
    *("max_seqlen_kv", "head_dim_qk", "head_dim_v", "window_size_left", "window_size_right"),
    *("return_max_logit", "cuda_graph", "deterministic"),
)
"""The same arguments as fields of the only argument that versions since 2.20 take."""
_ABSENT = {"is_training": True, "softmax": 0, "wants_max_logit": False, "is_deterministic": False}


def get_fused_attn_backend(*arguments: Any) -> Any:
    """Return the backend, ``NVTE_No_Backend`` if cuDNN has none; since 2.20 also the reason."""
    if len(arguments) > 1:
        return choose(_call(arguments))
    params = arguments[0]
    backend = choose(_call([getattr(params, field) for field in _FIELDS]))
    refused = backend == NVTE_Fused_Attn_Backend["NVTE_No_Backend"]
    return backend, "cuDNN has no kernel for it" if refused else ""


def _call(arguments: Sequence[Any]) -> AttentionCall:
    lacking = _NOT_YET.get(len(arguments), ())
    positions = [name for name in _POSITIONS if name not in lacking]
    given = dict(zip(positions, arguments, strict=False))
    major, minor = torch.cuda.get_device_capability()
    of_cudnn = {name: given[name] for name in given if name not in ("kv_dtype", "in_cuda_graph")}
    return AttentionCall(
        dtype=DType(int(of_cudnn.pop("q_dtype"))),
        window=(of_cudnn.pop("window_left"), of_cudnn.pop("window_right")),
        arch=10 * major + minor,
        cudnn=installed_cudnn(),
        **(_ABSENT | of_cudnn),
    )


def choose(call: AttentionCall) -> Any:
    """Return the backend that takes ``call``, or ``NVTE_No_Backend``."""
    backend: Any = NVTE_Fused_Attn_Backend
    if call.dtype in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        return backend.NVTE_FP8 if _takes_fp8(call) else backend.NVTE_No_Backend
    if call.dtype in (DType.kFloat16, DType.kBFloat16) and _takes_16_bits(call):
        return backend.NVTE_F16_arbitrary_seqlen
    return backend.NVTE_No_Backend


def _takes_fp8(call: AttentionCall) -> bool:
    return (
        call.arch >= _HOPPER
        and call.bias == NVTE_Bias_Type["NVTE_NO_BIAS"]
        and _takes_fp8_heads(call)
        and call.head_size % 16 == call.value_size % 16 == 0
        and _takes_fp8_format(call)
        and not call.wants_max_logit
    )


def _has_newer_fp8(call: AttentionCall) -> bool:
    return call.cudnn >= _9_21 and is_since(2, 15)


def _takes_fp8_format(call: AttentionCall) -> bool:
    if _has_newer_fp8(call):
        return call.format in ("bshd", "sbhd", "bhsd")
    is_vanilla = bool(call.softmax == NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"])
    return call.format in ("bshd", "sbhd") and is_vanilla


def _takes_fp8_heads(call: AttentionCall) -> bool:
    """Return whether FP8 attention takes the call's head sizes under its mask."""
    sizes, mask = (call.head_size, call.value_size), int(call.mask)
    if call.arch >= _BLACKWELL and _has_newer_fp8(call) and mask not in _PADDING:
        return call.head_size <= 192 and call.value_size <= 128
    if mask in _BOTTOM_RIGHT:
        return False
    if call.arch >= _BLACKWELL:
        return max(sizes) <= 128
    return sizes == (128, 128) if call.is_training else max(sizes) <= 256


def _takes_16_bits(call: AttentionCall) -> bool:
    return (
        call.arch >= 80
        and _takes_heads(call)
        and _takes_bias(call)
        and _takes_mask(call)
        and _takes_window(call)
        and (call.format != "thd" or call.arch >= _HOPPER)
        and (not call.wants_max_logit or call.cudnn >= _9_21 or not is_since(2, 17))
        and _takes_determinism(call)
    )


def _takes_heads(call: AttentionCall) -> bool:
    qk, v = call.head_size, call.value_size
    if qk % 8 or v % 8:
        return False
    if call.is_training and call.arch == _HOPPER and qk >= 128 and v >= 128 and qk != v:
        return (qk, v) == (192, 128)
    if max(qk, v) <= 128 or (max(qk, v) <= 256 and call.arch == _HOPPER):
        return True
    if not call.is_training:
        return call.length > 1 or int(call.mask) not in (2, 3)
    if (qk, v) == (256, 256) and _BLACKWELL <= call.arch < 110:
        return _takes_256_on_blackwell(call)
    return (qk, v) == (192, 128) and call.arch >= _BLACKWELL


def _takes_256_on_blackwell(call: AttentionCall) -> bool:
    """Return whether Blackwell has a backward pass for heads of 256; it is deterministic there."""
    windows_fit = call.window == _FULL_WINDOW or (
        int(call.mask) in _CAUSAL and call.window[1] in (-1, 0)
    )
    return (
        is_since(2, 18)
        and call.cudnn >= (_9_25 if call.format == "thd" else _9_23)
        and _is_plain(call)
        and call.softmax == NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"]
        and windows_fit
    )


def _takes_determinism(call: AttentionCall) -> bool:
    """Return whether a backward pass on Blackwell can be as deterministic as was asked."""
    if call.arch < _BLACKWELL or not call.is_training or not is_since(2, 12):
        return True
    if call.is_deterministic:
        return call.cudnn >= _9_18_1 and _is_plain(call)
    return call.dropout == 0.0 or call.bias == NVTE_Bias_Type["NVTE_NO_BIAS"]


def _is_plain(call: AttentionCall) -> bool:
    return call.bias == NVTE_Bias_Type["NVTE_NO_BIAS"] and call.dropout == 0.0


def _takes_bias(call: AttentionCall) -> bool:
    bias, mask = call.bias, call.mask
    if bias == NVTE_Bias_Type["NVTE_NO_BIAS"]:
        return True
    if bias == NVTE_Bias_Type["NVTE_ALIBI"]:
        return call.arch >= _HOPPER and mask == NVTE_Mask_Type["NVTE_CAUSAL_MASK"]
    return bias == NVTE_Bias_Type["NVTE_POST_SCALE_BIAS"] and int(mask) not in (1, 3)


def _takes_mask(call: AttentionCall) -> bool:
    mask = int(call.mask)
    if call.format == "thd" and mask not in _PADDING:
        return False
    return mask not in _BOTTOM_RIGHT or call.length <= call.keys


def _takes_window(call: AttentionCall) -> bool:
    left, right = call.window
    if left == -1 and right in (-1, 0):
        return True
    if is_since(2, 13) and call.dropout == 0.0 and int(call.mask) in (0, 1):
        return call.bias == NVTE_Bias_Type["NVTE_NO_BIAS"]
    fits = right == 0 and int(call.mask) in _CAUSAL and call.length <= call.keys
    return fits and _is_plain(call)


FUNCTIONS = {"get_fused_attn_backend": get_fused_attn_backend}
