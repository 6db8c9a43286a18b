"""FlashAttention 3's Python functions over its operators, for programs that use a hub's kernel.

A hub's kernel is downloaded with its Python code, so that code is not installed here. Arguments and
results are those of hopper/flash_attn_interface.py of Dao-AILab/flash-attention (2026-08). Forward
and backward are operators of ``torch.library`` with shape rules, so that ``torch.compile`` takes
each as a whole.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.flash_attention.flash_attention_3 import (
    NO_CACHES,
    output_dtype,
)
from prismscale.devices.null.libraries.stand_in import module_of

LIBRARY = "FlashAttention 3 from a hub"
_Window = tuple[int, int]
_NO_WINDOW: _Window = (-1, -1)


@cache
def interface() -> ModuleType:
    """Return the module that a hub would give.

    The operators of ``flash_attn_3`` must be registered already.
    """
    functions = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    }
    inner = module_of("flash_attn_interface", functions, library=LIBRARY)
    _operators()
    return module_of("flash_attn3", functions | {"flash_attn_interface": inner}, library=LIBRARY)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: _Window = _NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Return the output and, with ``return_attn_probs``, row statistics.

    Tensors are of (batch, length, heads, size).
    """
    _refuse(qv, attention_chunk)
    choice = (causal, *window_size)
    out, rows = torch.ops.flash_attn_3._hub_forward(q, k, v, None, None, 0, 0, *choice)
    return (out, rows) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: _Window = _NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_func`, for packed sequences (tokens, heads, size)."""
    _refuse(qv, attention_chunk)
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    choice = (causal, *window_size)
    out, rows = torch.ops.flash_attn_3._hub_forward(q, k, v, *ends, *choice)
    return (out, rows) if return_attn_probs else out


def flash_attn_with_kvcache(*arguments: Any, **named: Any) -> Any:
    """Refuse the call: caches are for inference."""
    raise NotImplementedError(NO_CACHES)


def _refuse(qv: Tensor | None, attention_chunk: int) -> None:
    if qv is not None or attention_chunk:
        raise NotImplementedError(
            "prismscale's stand-in for FlashAttention 3 has neither qv nor attention_chunk"
        )


@cache
def _operators() -> torch.library.Library:
    """Define forward and backward, which exist as long as the returned library is held."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name, (schema, function, shapes) in _OPERATORS.items():
        library.define(f"{name}{schema}")
        library.impl(name, function, "CUDA")
        library.impl(name, shapes, "Meta")
    torch.library.register_autograd(
        "flash_attn_3::_hub_forward", _gradients, setup_context=_kept, lib=library
    )
    return library


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    out, rows, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **_named(*call))
    return out, rows


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, *call: Any
) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
    grads = {"dq": dq, "dk": dk, "dv": dv}
    torch.ops.flash_attn_3.bwd(grad, q, k, v, out, rows, **grads, **_named(*call))
    return dq, dk, dv


def _named(
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    left: int,
    right: int,
) -> dict[str, Any]:
    """Return the arguments of :data:`_CALL` as the extension's operators take them."""
    packed = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
    }
    choice = {"is_causal": causal, "window_size_left": left, "window_size_right": right}
    return choice if cu_q is None else packed | choice


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    heads = q.shape[-2]
    rows = (heads, q.shape[0]) if q.dim() == 3 else (q.shape[0], heads, q.shape[1])
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=output_dtype(q))
    return out, q.new_empty(rows, dtype=torch.float32)


def _backward_shapes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.flash_attn_3._hub_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*grads, *[None] * (2 + len(ctx.rest)))


_INPUTS = "Tensor q, Tensor k, Tensor v"
_CALL = "Tensor? cu_q, Tensor? cu_k, int max_q, int max_k, bool causal, int left, int right"
_OPERATORS = {
    "_hub_forward": (f"({_INPUTS}, {_CALL}) -> (Tensor, Tensor)", _forward, _forward_shapes),
    "_hub_backward": (
        f"(Tensor grad, {_INPUTS}, Tensor out, Tensor rows, {_CALL}) -> (Tensor, Tensor, Tensor)",
        _backward,
        _backward_shapes,
    ),
}
"""Schema, kernel and shape rule of each operator."""
