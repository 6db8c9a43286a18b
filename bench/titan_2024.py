"""Modules of torchtitan as it was at the end of 2024, for the configurations of ``titan_configs``.

The published throughput of December 2024 was measured with these. torchtitan 0.3.0 has since moved
to torch's fused RMSNorm, to flex attention with document masks, and to one product for queries,
keys and values; eager steps became shorter by it. What follows is written from what torchtitan
90567fc (January 2025) computes in ``models/norms.py`` and ``models/llama/model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module


class ElementaryRMSNorm(RMSNorm):
    """The norm as a row of elementwise operators, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """As of the norm that it replaces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        eps = 0.0 if self.eps is None else self.eps
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return scaled.type_as(x) * self.weight


class RepeatedKeyAttention(Module):
    """Causal attention without document masks, keys and values repeated for every query head."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Nothing to choose."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """All of shape (batch, length, heads, head size); so is the result."""
        repeats = query.shape[2] // key.shape[2]
        heads_first = (
            query.transpose(1, 2),
            _repeated(key, repeats).transpose(1, 2),
            _repeated(value, repeats).transpose(1, 2),
        )
        found = functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return found.transpose(1, 2)


def _repeated(heads: torch.Tensor, repeats: int) -> torch.Tensor:
    batch, length, n_heads, size = heads.shape
    wide = heads[:, :, :, None, :].expand(batch, length, n_heads, repeats, size)
    return wide.reshape(batch, length, n_heads * repeats, size)


def as_of_2024(spec: ModelSpec) -> None:
    """Put these modules into a Llama-3 specification."""
    model: Any = spec.model
    model.norm = _elementary(model.norm)
    for layer in model.layers:
        layer.attention_norm = _elementary(layer.attention_norm)
        layer.ffn_norm = _elementary(layer.ffn_norm)
        attention = layer.attention
        attention.inner_attention = RepeatedKeyAttention.Config()
        attention.qkv_linear = _separate(attention)


def _elementary(norm: RMSNorm.Config) -> ElementaryRMSNorm.Config:
    return ElementaryRMSNorm.Config(**{f.name: getattr(norm, f.name) for f in fields(norm)})


def _separate(attention: Any) -> QKVLinear.Config:
    """Three products in place of the fused one."""
    fused = attention.qkv_linear
    size, init = fused.head_dim, attention.wo.param_init
    linear = type(fused.wqkv)
    return QKVLinear.Config(
        head_dim=size,
        wq=linear(
            in_features=attention.dim, out_features=attention.n_heads * size, param_init=init
        ),
        wkv=linear(
            in_features=attention.dim, out_features=attention.n_kv_heads * size, param_init=init
        ),
    )
