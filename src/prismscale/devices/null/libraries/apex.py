"""Stand-in for Apex: the extension kernels that megatron-core and Apex's own Python code use.

Source: csrc and csrc/megatron of NVIDIA/apex (2026-07). ``wgrad_gemm_accum`` runs on torch's own
cuBLAS handle. The backward pass of the norms has a workspace for the gradient of each weight: 16
rows of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from prismscale.devices.null.libraries import multi_tensor
from prismscale.devices.null.libraries.launches import gemm, launch, memory
from prismscale.devices.null.libraries.softmax_kernels import softmax_backward, softmax_forward
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_PARTIAL_ROWS = 16
_NAME = "Apex"


def stand_in() -> StandIn:
    """Return the stand-in, which applies where Apex's Python code is installed."""
    contents: dict[str, Callable[[], Mapping[str, Any]]] = {
        "amp_C": lambda: multi_tensor.functions("apex"),
        "apex_C": lambda: {"flatten": _flatten_dense_tensors, "unflatten": _unflatten},
        "fused_layer_norm_cuda": _norms,
        "fused_weight_gradient_mlp_cuda": _weight_gradients,
        **{name: partial(_softmax, name) for name in _SOFTMAXES},
    }
    return StandIn(
        name=_NAME,
        namespace="apex",
        modules={name: partial(_module, name, content) for name, content in contents.items()},
        python="apex",
        distribution="apex",
    )


def _module(name: str, content: Callable[[], Mapping[str, Any]]) -> ModuleType:
    return module_of(name, content(), library=_NAME)


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(_unflatten_dense_tensors(flat, tensors))


_SOFTMAXES = (
    "scaled_softmax_cuda",
    "scaled_masked_softmax_cuda",
    "generic_scaled_masked_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
)


def _softmax(module: str) -> Mapping[str, Any]:
    kernel = f"apex::{module.removesuffix('_cuda')}"

    def forward(scores: Tensor, *rest: Any) -> Tensor:
        """Return probabilities; ``rest`` is a mask, if there is one, and the scale."""
        mask = rest[0] if isinstance(rest[0], Tensor) else None
        return softmax_forward(f"{kernel}_forward", scores, mask)

    def backward(grad: Tensor, probabilities: Tensor, *_: Any) -> Tensor:
        """Return the gradient of the scores."""
        return softmax_backward(f"{kernel}_backward", grad, probabilities)

    return {"forward": forward, "backward": backward, "get_batch_per_block": _batch_per_block}


def _batch_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """Return the rows per block of 128 threads: one per warp, or two of up to 128 keys."""
    elements = 1 << max(keys - 1, 1).bit_length()
    warps = 128 // min(32, elements)
    return warps * (2 if elements <= 128 else 1)


def _weight_gradients() -> Mapping[str, Any]:
    def accumulate(name: str, x: Tensor, grad: Tensor, total: Tensor) -> None:
        """Add gradᵀ · x to ``total``."""
        rows = math.prod(x.shape[:-1])
        cost = gemm((1, grad.shape[-1], x.shape[-1], rows))
        launch(f"apex::{name}", cost, reads=[grad, x, total], writes=[total])

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    return {name: partial(accumulate, name) for name in names}


def _norms() -> Mapping[str, Any]:
    return {
        "forward": partial(_forward, "layer_norm", 2),
        "forward_affine": partial(_forward, "layer_norm", 2),
        "forward_affine_mixed_dtypes": partial(_forward_mixed, "layer_norm", 2),
        "rms_forward": partial(_forward, "rms_norm", 1),
        "rms_forward_affine": partial(_forward, "rms_norm", 1),
        "rms_forward_affine_mixed_dtypes": partial(_forward_mixed, "rms_norm", 1),
        "backward": partial(_backward, "layer_norm", 2),
        "backward_affine": partial(_backward, "layer_norm", 2),
        "rms_backward": partial(_backward, "rms_norm", 1),
        "rms_backward_affine": partial(_backward, "rms_norm", 1),
    }


def _forward(name: str, statistics: int, x: Tensor, shape: Sequence[int], *rest: Any) -> list[Any]:
    """Return output, mean (LayerNorm only) and inverse deviation.

    Mean and deviation are float32 for 16-bit inputs.
    """
    return _normed(name, statistics, x, shape, rest, x.dtype)


def _forward_mixed(
    name: str, statistics: int, x: Tensor, shape: Sequence[int], *rest: Any
) -> list[Any]:
    """As :func:`_forward`, with an output of the weight's type."""
    return _normed(name, statistics, x, shape, rest, rest[0].dtype)


def _normed(
    name: str,
    statistics: int,
    x: Tensor,
    shape: Sequence[int],
    rest: Sequence[Any],
    dtype: torch.dtype,
) -> list[Any]:
    rows = x.numel() // math.prod(shape)
    out = torch.empty_like(x, dtype=dtype)
    kept = [x.new_empty(rows, dtype=_statistics_dtype(x)) for _ in range(statistics)]
    weights = [tensor for tensor in rest if isinstance(tensor, Tensor)]
    launch(f"apex::{name}", memory("norm"), reads=[x, *weights], writes=[out, *kept])
    return [out, *kept]


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _backward(name: str, statistics: int, grad: Tensor, *rest: Any) -> Any:
    """Return the gradient of the input and, if there are weights, of each of them."""
    x, shape = rest[statistics], rest[statistics + 1]
    weights = [tensor for tensor in rest[statistics + 2 :] if isinstance(tensor, Tensor)]
    grads = [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]
    rows = (_PARTIAL_ROWS, math.prod(shape))
    partial_sums = [x.new_empty(rows, dtype=torch.float32) for _ in weights]
    launch(
        f"apex::{name}_backward",
        memory("norm_backward", launches=2 if weights else 1),
        reads=[grad, *(tensor for tensor in rest if isinstance(tensor, Tensor))],
        writes=[*grads, *partial_sums],
    )
    return grads if weights else grads[0]
