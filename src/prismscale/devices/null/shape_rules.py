"""Shape rules for ops whose Meta kernel torch lacks, or whose Meta kernel is narrower than CUDA's.

Since torch 2.15 ``varlen_attn`` uses cuDNN's attention over packed sequences if cuDNN is 9.18 or
newer and the GPU is a Hopper or a Blackwell. The outputs' shapes are those of
``torch/nn/attention/varlen.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give torch the missing shape rules and the wider ones; harmless if it has them."""
    library = torch.library.Library("aten", "IMPL")
    rules = {"_cudnn_attention_forward": _forward, "_cudnn_attention_backward": _backward}
    for name, rule in rules.items():
        known = hasattr(torch.ops.aten, name)
        if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, rule, "Meta")
    for overload in ("Scalar", "Tensor"):
        for name in ("__lshift__", "__rshift__"):
            library.impl(f"{name}.{overload}", _shift(name), "Meta", allow_override=True)
    _libraries.append(library)  # kept alive: its rules end with it


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:
    """Return the output, a statistic for each row of scores, and what dropout would need."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    packed = query.dim() == 3  # (tokens, heads, size), else (batch, heads, length, size)
    rows = (query.shape[1], query.shape[0]) if packed else query.shape[:-1]
    statistics = query.new_empty(rows if compute_log_sumexp else (0,), dtype=torch.float32)
    starts = (query.new_empty(0) if cu is None else cu for cu in (cum_seq_q, cum_seq_k))
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return out, statistics, *starts, max_q, max_k, seed, offset, query.new_empty(0)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    return tuple(torch.empty_like(tensor) for tensor in (query, key, value))


def _shift(name: str) -> Callable[[Tensor, Any], Tensor]:
    def rule(tensor: Tensor, other: Any) -> Tensor:
        if tensor.dtype == torch.bool:  # a shifted boolean becomes an integer
            return torch.add(tensor, other)
        rules = import_module("torch._meta_registrations")
        shifted: Tensor = getattr(rules, f"meta_{name[2]}shifts")(tensor, other)
        return shifted

    return rule
