"""FlexAttention as the one fused kernel that it is on a GPU.

Programs compile ``flex_attention`` with inductor. Without torch.compile, torch computes it from
single ops and materialises all scores, which no GPU run does. Here the higher-order operator has an
implementation for CUDA: one op forward and one backward. They allocate the outputs of the fused
kernels and nothing in between. Inductor lowers the operator to the same two ops.

Each op launches a kernel whose ``density`` says, in thousandths, what share of the blocks of scores
the mask leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch._C import DispatchKey
from torch._guards import detect_fake_mode
from torch._higher_order_ops.flex_attention import (
    _permute_strides,
    flex_attention,
    flex_attention_backward,
)

from prismscale.devices.null.flex.block_masks import share_of_blocks

_UNKNOWN = -1
"""Density where the share of blocks is unknown: the kernel model assumes a causal mask."""
_KERNELS = {
    "flex_attention": "Tensor query, Tensor key, Tensor value",
    "flex_attention_backward": """Tensor query, Tensor key, Tensor value, Tensor out,
        Tensor logsumexp, Tensor grad_out""",
}
_MASK = "Tensor? partial, Tensor? columns, Tensor? full"
_library: torch.library.Library


def install() -> None:
    """Register the ops, and the higher-order operators' CUDA implementations that call them."""
    global _library
    _library = torch.library.Library("prismscale_null", "FRAGMENT")
    shapes = {"flex_attention": _forward_shapes, "flex_attention_backward": _backward_shapes}
    for kernel, tensors in _KERNELS.items():
        inputs = " ".join(tensors.split())
        outputs = "(Tensor, Tensor, Tensor)"
        _library.define(f"{kernel}({inputs}, int density) -> {outputs}")
        _library.define(f"masked_{kernel}({inputs}, {_MASK}) -> {outputs}")
        _library.impl(kernel, _without_mask(shapes[kernel], 1), "Meta")
        _library.impl(f"masked_{kernel}", _without_mask(shapes[kernel], 3), "Meta")
        _library.impl(f"masked_{kernel}", partial(_launch, kernel), "CUDA")
    # The module calls it by name, once for every call of flex_attention that needs gradients.
    module: Any = import_module("torch._higher_order_ops.flex_attention")
    module.create_fw_bw_graph = _untraced(module.create_fw_bw_graph)
    flex_attention.py_impl(DispatchKey.CUDA)(_forward)
    flex_attention_backward.py_impl(DispatchKey.CUDA)(_backward)


def lower_to_ops(_: Any) -> None:
    """Let inductor call the ops instead of its templates.

    The templates take their work from the values of a mask, which do not exist here.
    """
    lowering: Any = import_module("torch._inductor.lowering")
    ops: Any = torch.ops.prismscale_null
    forward, backward = (
        lowering.fallback_handler(op, add_to_fallback_set=False)
        for op in (ops.masked_flex_attention.default, ops.masked_flex_attention_backward.default)
    )

    def lower_forward(query: Any, key: Any, value: Any, _: Any, mask: Any, *rest: Any) -> Any:
        return forward(query, key, value, *_blocks(mask))

    def lower_backward(*arguments: Any) -> tuple[Any, ...]:
        tensors, rest = arguments[:6], arguments[6:]
        return *backward(*tensors, *_blocks(rest[3])), (None,) * len(rest[6])

    lowering.lowerings[flex_attention] = lower_forward
    lowering.lowerings[flex_attention_backward] = lower_backward


def _blocks(mask: Any) -> tuple[Any, Any, Any]:
    """Return the partial key blocks, their indices and the full blocks of a mask's tuple."""
    _, _, partial_blocks, columns, full_blocks, *_ = mask
    return partial_blocks, columns, full_blocks


def _without_mask(shapes: Callable[..., Any], n_arguments: int) -> Callable[..., Any]:
    return lambda *arguments: shapes(*arguments[:-n_arguments])


def _launch(kernel: str, *arguments: Any) -> Any:
    """Run ``kernel`` with the share of blocks that the mask (the last three arguments) leaves."""
    tensors, mask = arguments[:-3], arguments[-3:]
    share = None if mask[0] is None else share_of_blocks(*mask)
    density = _UNKNOWN if share is None else _rounded(1000 * share)
    return getattr(torch.ops.prismscale_null, kernel)(*tensors, density)


def _rounded(thousandths: float) -> int:
    """Round to two digits, so that batches whose documents differ a little share one kernel."""
    return max(1, round(float(f"{thousandths:.2g}")))


def _untraced(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Skip the tracing of score modifications, which the null device's kernels never call.

    Score modifications in a region that is being compiled are traced.
    """

    def create_fw_bw_graph(score_mod: Any, example_vals: Any, buffers: Any) -> Any:
        if example_vals[0].is_cuda and detect_fake_mode() is None:
            return score_mod, score_mod
        return trace(score_mod, example_vals, buffers)

    return create_fw_bw_graph


def _forward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, heads, length, value.size(-1))
    out = _permute_strides(out, query.stride())
    logsumexp = query.new_empty(batch, heads, length, dtype=torch.float32)
    return out, logsumexp, torch.empty_like(logsumexp)


def _backward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, mask: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    result = torch.ops.prismscale_null.masked_flex_attention(query, key, value, *_blocks(mask))
    return result


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[None, ...]]:
    grad = torch.empty_like(out) if grad_out is None else grad_out
    grads = torch.ops.prismscale_null.masked_flex_attention_backward(
        query, key, value, out, logsumexp, grad, *_blocks(rest[3])
    )
    captured_by_score = rest[6] if len(rest) > 6 else ()
    return *grads, (None,) * len(captured_by_score)
