"""A Llama-style decoder, whole or only the layers of one pipeline stage.

Dimensions, as suffixes: B batch, L sequence, D hidden, N heads, H head_dim, V vocab.
Under tensor parallelism N and V are this rank's share.
"""

from __future__ import annotations

import torch
from config import ModelConfig
from moe import FeedForward, MixtureOfExperts
from torch import Tensor, nn
from torch.nn import functional as F


def rope_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary embedding, fp32, shape (2, length, head_dim)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.outer(torch.arange(length, device=device).float(), frequency)
    angle_LH = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle_LH.cos(), angle_LH.sin()))


def apply_rope(x_BNLH: Tensor, rope_2LH: Tensor) -> Tensor:
    """Rotate each position's (i, i + H/2) pairs by its angles, in fp32."""
    cos_LH, sin_LH = rope_2LH
    first, second = x_BNLH.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    out_BNLH: Tensor = (x_BNLH * cos_LH + rotated * sin_LH).type_as(x_BNLH)
    return out_BNLH


class RMSNorm(nn.RMSNorm):
    """Norm in the dtype of its input: torch's fused kernel wants a weight of the same dtype."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        return F.rms_norm(x_BLD, self.normalized_shape, self.weight.to(x_BLD.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv_hidden = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads < config.heads
        self.wq = nn.Linear(config.hidden, config.hidden, bias=False)
        self.wk = nn.Linear(config.hidden, kv_hidden, bias=False)
        self.wv = nn.Linear(config.hidden, kv_hidden, bias=False)
        self.wo = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BLD: Tensor, rope_2LH: Tensor) -> Tensor:
        q_BNLH = apply_rope(self._split_heads(self.wq(x_BLD)), rope_2LH)
        k_BNLH = apply_rope(self._split_heads(self.wk(x_BLD)), rope_2LH)
        v_BNLH = self._split_heads(self.wv(x_BLD))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, is_causal=True, enable_gqa=self.grouped
        )
        out_BLD: Tensor = self.wo(out_BNLH.transpose(1, 2).flatten(2))
        return out_BLD

    def _split_heads(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        return x_BLD.view(batch, length, -1, self.head_dim).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention and feed-forward (or experts), each added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.ffn = MixtureOfExperts(config) if config.experts else FeedForward(config)

    def forward(self, x_BLD: Tensor, rope_2LH: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope_2LH)
        out_BLD: Tensor = x_BLD + self.ffn(self.ffn_norm(x_BLD))
        return out_BLD


class Llama(nn.Module):
    """The decoder's `layers`; the embedding comes with the first, norm and head with the last.

    Build it on the meta device, shard it, then call `materialize`. Layers keep their number in
    the whole model, so that a parameter has the same name in every layout.
    """

    rope: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range,
        seq_len: int,
        dtype: torch.dtype,
        autocast: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.autocast = autocast
        is_first, is_last = layers.start == 0, layers.stop == config.layers
        self.embed = nn.Embedding(config.vocab, config.hidden) if is_first else None
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps) if is_last else None
        self.head = nn.Linear(config.hidden, config.vocab, bias=False) if is_last else None
        self.register_buffer("rope", torch.empty(2, seq_len, config.head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, L) on the first stage, else hidden states; logits on the last stage."""
        with torch.autocast(self.rope.device.type, dtype=self.dtype, enabled=self.autocast):
            # Residuals, and so what stages send each other, are in the dtype of computation.
            h_BLD = x if self.embed is None else self.embed(x).to(self.dtype)
            for block in self.layers.values():
                h_BLD = block(h_BLD, self.rope)
            if self.norm is None or self.head is None:
                return h_BLD
            logits_BLV: Tensor = self.head(self.norm(h_BLD))
            return logits_BLV
