"""Fused attention: work of the tensor cores, with a share that short sequences lose.

Forward: two products, ``2·B·H·L·S·(D + Dv)`` operations, of which a mask leaves a share: half, if
it is causal, or what a block mask says. Backward: five products where the forward has two
(FlashAttention-2, arXiv 2307.08691, section 3.1.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prismscale.cost.kernel_gemm import operand_dtype, roofline_of
from prismscale.cost.kernel_profile import AttentionRoofline, KernelProfile
from prismscale.cost.kernel_signature import KernelCall
from prismscale.cost.kernel_tiles import POWER_SHARPNESS

_BACKWARD_FACTOR = 2.5
_QUERY_BLOCK = 128
_CAUSAL = 0.5
"""Share of the scores that a causal mask leaves."""
_FAMILIES = {
    # Within a tenth of cuDNN's in its own figures (arXiv 2407.08608, figures 5 and 6).
    "flash_attn_3": "cudnn",
    "flash": "flash",
    "efficient": "efficient",
    "cudnn": "cudnn",
    "flex": "flex",
}
"""Rooflines of the families of attention, by a part of the operator's name."""


def attention_ns(profile: KernelProfile, call: KernelCall, kind: str) -> float:
    """Time of a fused attention call; ``kind`` is ``attention`` or ``attention_backward``."""
    backward = kind == "attention_backward"
    roofline = _roofline(profile, call, backward)
    scores = _scores(call, backward)
    keys, reached = scores.keys * scores.share, roofline.efficiency
    if scores.share < 1:
        reached *= roofline.causal_factor
    reached *= keys / (keys + roofline.length_overhead)
    reached *= 1.0 if scores.head_size > 64 else roofline.small_head_factor
    # Whatever a block mask leaves: every block of keys has its own thread block.
    spread = int(keys) if scores.share == _CAUSAL else scores.keys
    reached *= _fill(profile, scores.batch_heads, spread if backward else scores.length)
    flops = scores.flops * (_BACKWARD_FACTOR if backward else 1.0)
    products = roofline_of(profile, scores.dtype)
    reached = _lasting(reached, products.sustained_cap)
    peak = products.peak_flops
    n_bytes = sum(t.n_bytes for t in (*call.inputs, *call.outputs))
    moved = 1e9 * n_bytes / profile.memory_bandwidth_bytes_per_s
    return roofline.base_ns + max(1e9 * flops / (peak * reached) if flops else 0.0, moved)


def _lasting(reached: float, cap: float | None) -> float:
    """The share of the peak that the power limit lets last, as for products."""
    if cap is None:
        return reached
    return reached * (1 + (reached / cap) ** POWER_SHARPNESS) ** (-1 / POWER_SHARPNESS)


def attention_flops(call: KernelCall, *, backward: bool = False) -> tuple[float, float]:
    """Operations of a call: without those that a mask leaves out, and with them."""
    scores = _scores(call, backward)
    flops = scores.flops * (_BACKWARD_FACTOR if backward else 1.0)
    return flops, flops / scores.share if scores.share else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """The matrices of scores that a call computes."""

    batch_heads: int
    length: int
    keys: int
    head_size: int
    value_size: int
    share: float
    """Of the scores, that the mask leaves."""
    dtype: str

    @property
    def flops(self) -> float:
        """Of the two products of the forward pass."""
        scores = self.batch_heads * self.length * self.keys * self.share
        return 2.0 * scores * (self.head_size + self.value_size)


def _scores(call: KernelCall, backward: bool) -> _Scores:
    if call.is_library and "extents" in call.arguments:
        batch_heads, length, keys, head_size, value_size, is_causal = call.arguments["extents"]
        share = _CAUSAL if is_causal else 1.0
        dtype = operand_dtype(call)
    else:
        # The backward's first input is the gradient of the output, except for flex attention.
        query = 1 if backward and "flex" not in call.base else 0
        q, k, v = call.inputs[query : query + 3]
        batch_heads, length, keys = _extent(call, q.sizes, k.sizes)
        head_size, value_size, share = q.sizes[-1], v.sizes[-1], share_left(call)
        dtype = q.dtype
    return _Scores(
        batch_heads=batch_heads,
        length=length,
        keys=keys,
        head_size=head_size,
        value_size=value_size,
        share=share,
        dtype=dtype,
    )


def share_left(call: KernelCall) -> float:
    """Of the scores, that the mask leaves.

    flex_attention's mask is a program that the signature does not show. Where it could be asked,
    the signature has the share of blocks in thousandths; where not, half is assumed: language
    models use it for causal masks.
    """
    density = call.arguments.get("density", (-1,))[0]
    if density >= 0:
        return density / 1000
    is_causal = call.flag("is_causal") or call.flag("causal") or "flex" in call.base
    return _CAUSAL if is_causal else 1.0


def _roofline(profile: KernelProfile, call: KernelCall, backward: bool) -> AttentionRoofline:
    family = next((_FAMILIES[name] for name in _FAMILIES if name in call.base), "flash")
    suffix = "_backward" if backward else ""
    return profile.attention.get(family + suffix, profile.attention["flash" + suffix])


def _extent(call: KernelCall, query: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, int, int]:
    """Batch × heads, query length, key length.

    The operators under ``scaled_dot_product_attention`` take (batch, heads, length, head size); the
    ``_flash_attention`` and ``_efficient_attention`` ones (batch, length, heads, head size), or
    packed sequences (tokens, heads, head size) with the longest lengths as arguments.
    """
    if len(query) == 3:
        longest = call.arguments.get("max_q", (query[0],))[0]
        longest_key = call.arguments.get("max_k", (key[0],))[0]
        return query[1] * max(1, query[0] // max(longest, 1)), longest, longest_key
    if call.base.startswith(("_flash", "_efficient")):
        return query[0] * query[2], query[1], key[1]
    return query[0] * query[1], query[2], key[2]


def _fill(profile: KernelProfile, batch_heads: int, length: int) -> float:
    """Share of the multiprocessors that have a block of queries (or keys) to work on."""
    blocks = batch_heads * max(1, math.ceil(length / _QUERY_BLOCK))
    waves = math.ceil(blocks / profile.multiprocessors)
    return max(1e-3, blocks / (waves * profile.multiprocessors))
