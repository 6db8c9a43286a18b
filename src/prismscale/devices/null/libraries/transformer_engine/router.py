"""Kernels of the router.

Most of their arguments are given by name, and differ from version to version. Source:
pytorch/csrc/extensions/router.cpp of Transformer Engine 2.6 to 2.18.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import empty_as
from prismscale.devices.null.libraries.transformer_engine.versions import is_since

_TE = "transformer_engine::"
_BITS_A_BYTE = 8
_BACKWARD_TENSORS = ("routing_map", "intermediate_output", "grad_probs", "grad_logits")


def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    *_: Any,
    routing_map_format: int = 0,
    topk_indices: Any = None,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, routing map, and what the backward pass needs.

    The map has a byte or a bit for each expert, or it is ``topk_indices``, which the kernel fills.
    """
    probs = empty_as(logits.shape, logits.dtype)
    routes = _routes(logits, routing_map_format) if topk_indices is None else topk_indices
    kept = empty_as(logits.shape, _kept_dtype(logits))
    launch(f"{_TE}fused_topk_fwd", memory("softmax"), reads=[logits], writes=[probs, routes, kept])
    _mark(routes, topk)
    return probs, routes, kept


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, *_: Any, routing_map_format: int = 0, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, routing map, and what the backward pass needs."""
    dtype = _kept_dtype(logits)
    scores, kept = empty_as(logits.shape, dtype), empty_as(logits.shape, dtype)
    routes = _routes(logits, routing_map_format)
    writes = [scores, routes, kept]
    launch(f"{_TE}fused_score_fwd", memory("softmax"), reads=[logits], writes=writes)
    _mark(routes, topk)
    return scores, routes, kept


def _kept_dtype(logits: Tensor) -> torch.dtype:
    return torch.float32 if is_since(2, 13) else logits.dtype


def _routes(logits: Tensor, routing_map_format: int) -> Tensor:
    if not int(routing_map_format):
        return empty_as(logits.shape, torch.bool)
    return empty_as((*logits.shape[:-1], -(-logits.shape[-1] // _BITS_A_BYTE)), torch.uint8)


def _mark(routes: Tensor, topk: int) -> None:
    """Record the share of experts that each token has, which counts over a map of bytes use."""
    if routes.dtype == torch.bool:
        ops: Any = torch.ops.prismscale_null
        ops.set_share(routes, topk / routes.shape[-1])


def fused_topk_with_score_function_bwd(*arguments: Any, **named: Any) -> Tensor:
    """Return the gradient of the logits, in ``grad_logits`` from 2.13 on.

    Among positional arguments, numbers stand before the tensors up to 2.16, and after them in every
    version.
    """
    tensors = (given for given in arguments if isinstance(given, Tensor))
    given = dict(zip(_BACKWARD_TENSORS, tensors, strict=False)) | named
    return _gradient(
        "fused_topk_bwd",
        [given[name] for name in _BACKWARD_TENSORS[:3]],
        given.get(_BACKWARD_TENSORS[3]),
    )


def fused_score_for_moe_aux_loss_bwd(
    *_: Any,
    intermediate_output: Tensor,
    grad_scores: Tensor,
    grad_logits: Tensor | None = None,
    **__: Any,
) -> Tensor:
    """As :func:`fused_topk_with_score_function_bwd`."""
    return _gradient("fused_score_bwd", [intermediate_output, grad_scores], grad_logits)


def _gradient(name: str, reads: list[Tensor], grad_logits: Tensor | None) -> Tensor:
    grad = reads[-1]
    if grad_logits is None:
        grad_logits = empty_as(grad.shape, grad.dtype)
    launch(_TE + name, memory("softmax_backward"), reads=reads, writes=[grad_logits])
    return grad_logits


def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Return the loss, and constants for its gradient."""
    loss = empty_as((), probs.dtype)
    constants = empty_as((2,) if is_since(2, 16) else (), torch.float32)
    launch(
        f"{_TE}fused_moe_aux_loss_fwd",
        memory("reduction"),
        reads=[probs, tokens_per_expert],
        writes=[loss, constants],
    )
    return loss, constants


# ``Const_buf`` is the library's own name of the argument.
def fused_moe_aux_loss_bwd(
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: Tensor,
) -> Tensor:
    """Return the gradient of the probabilities."""
    out = empty_as((num_rows, num_cols), grad_aux_loss.dtype)
    reads = [Const_buf, tokens_per_expert, grad_aux_loss]
    launch(f"{_TE}fused_moe_aux_loss_bwd", memory("pointwise"), reads=reads, writes=[out])
    return out


FUNCTIONS = {
    "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
    "fused_topk_with_score_function_bwd": fused_topk_with_score_function_bwd,
    "fused_score_for_moe_aux_loss_fwd": fused_score_for_moe_aux_loss_fwd,
    "fused_score_for_moe_aux_loss_bwd": fused_score_for_moe_aux_loss_bwd,
    "fused_moe_aux_loss_fwd": fused_moe_aux_loss_fwd,
    "fused_moe_aux_loss_fwd_graph_safe": fused_moe_aux_loss_fwd,
    "fused_moe_aux_loss_bwd": fused_moe_aux_loss_bwd,
}
