"""Attention calls: their shapes, and the implementation that runs them.

The forward pass is two products, ``2·B·H·L·S·(D + Dv)`` operations, of which a mask leaves a share:
half if it is causal, or the share of a block mask. :mod:`prismscale.cost.attention_blocks` models
their time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prismscale.cost.attention_blocks import (
    BACKWARD_FACTOR,
    CAUSAL,
    AttentionShapes,
    attention_times_ns,
)
from prismscale.cost.kernel_gemm import operand_dtype, roofline_of
from prismscale.cost.kernel_profile import AttentionRoofline, KernelProfile
from prismscale.cost.kernel_signature import KernelCall
from prismscale.errors import UsageError

_FAMILIES = {
    # Its backward pass has no measured rows and takes cuDNN's roofline: the two are within a tenth
    # of each other (arXiv 2407.08608, figure 6).
    "flash_attn_3": ("flash_3", "cudnn"),
    "flash": ("flash",),
    "efficient": ("efficient",),
    "cudnn": ("cudnn",),
    "flex": ("flex",),
    # Transformer Engine's attention, which uses cuDNN.
    "fused_attn": ("cudnn",),
}
"""Rooflines of each family of attention, best match first, by a part of the operator's name."""


def attention_ns(profile: KernelProfile, call: KernelCall, kind: str) -> float:
    """Return the time of a fused attention call of kind ``attention`` or ``attention_backward``."""
    backward = kind == "attention_backward"
    scores = _scores(call, backward)
    roofline = attention_roofline(profile, call.base, scores.dtype, backward=backward)
    n_bytes = sum(t.n_bytes for t in (*call.inputs, *call.outputs))
    if not scores.flops:
        return roofline.base_ns + 1e9 * n_bytes / profile.memory_bandwidth_bytes_per_s
    numbers = (
        scores.batch_heads,
        scores.length,
        scores.keys,
        scores.head_size,
        scores.value_size,
        scores.share,
        n_bytes,
    )
    shapes = AttentionShapes(*(np.array([number], float) for number in numbers))
    products = roofline_of(profile, scores.dtype)
    times_ns = attention_times_ns(
        profile,
        roofline,
        products,
        shapes,
        backward=backward,
        in_fixed_order=scores.in_fixed_order,
    )
    return float(times_ns[0])


def attention_roofline(
    profile: KernelProfile, operator: str, dtype: str, *, backward: bool
) -> AttentionRoofline:
    """Return the roofline of ``operator``: its own, or the next best one that the profile has."""
    names = next((_FAMILIES[name] for name in _FAMILIES if name in operator), ())
    suffix = "_backward" if backward else ""
    precisions = ("_fp8" if dtype.startswith("Float8") else f"_{dtype.lower()}", "")
    for name in (*names, "flash"):
        for precision in precisions:
            if name + precision + suffix in profile.attention:
                return profile.attention[name + precision + suffix]
    raise UsageError(f"kernel profile {profile.name} has no table attention.flash{suffix}")


def attention_flops(call: KernelCall, *, backward: bool = False) -> tuple[float, float]:
    """Return the operations of a call, without those that a mask leaves out and with them."""
    scores = _scores(call, backward)
    flops = scores.flops * (BACKWARD_FACTOR if backward else 1.0)
    return flops, flops / scores.share if scores.share else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """The score matrices that a call computes."""

    batch_heads: int
    length: int
    keys: int
    head_size: int
    value_size: int
    share: float
    """Share of the scores that the mask leaves."""
    dtype: str
    in_fixed_order: bool
    """Whether the program asked for a deterministic backward pass."""

    @property
    def flops(self) -> float:
        """Operations of the two products of the forward pass."""
        scores = self.batch_heads * self.length * self.keys * self.share
        return 2.0 * scores * (self.head_size + self.value_size)


def _scores(call: KernelCall, backward: bool) -> _Scores:
    if call.is_library and "extents" in call.arguments:
        batch_heads, length, keys, head_size, value_size, is_causal, *ordered = call.arguments[
            "extents"
        ]
        share = CAUSAL if is_causal else 1.0
        dtype = operand_dtype(call)
        in_fixed_order = any(ordered)
    else:
        # A backward call's first input is the gradient of the output, except in flex attention.
        query = 1 if backward and "flex" not in call.base else 0
        q, k, v = call.inputs[query : query + 3]
        batch_heads, length, keys = _extent(call, q.sizes, k.sizes)
        head_size, value_size, share = q.sizes[-1], v.sizes[-1], share_left(call, keys)
        dtype = q.dtype
        in_fixed_order = call.flag("deterministic")
    return _Scores(
        batch_heads=batch_heads,
        length=length,
        keys=keys,
        head_size=head_size,
        value_size=value_size,
        share=share,
        dtype=dtype,
        in_fixed_order=in_fixed_order,
    )


def share_left(call: KernelCall, keys: int) -> float:
    """Return the share of the scores of ``keys`` keys that the mask leaves.

    The mask of flex_attention is a program that the signature does not show. Where it could be
    evaluated, the signature states the share of blocks in thousandths. Elsewhere half is assumed,
    because language models use flex_attention for causal masks.
    """
    density = call.arguments.get("density", (-1,))[0]
    if density >= 0:
        return density / 1000
    return min(CAUSAL if _is_causal(call) else 1.0, _share_in_window(call, keys))


def _is_causal(call: KernelCall) -> bool:
    if call.flag("is_causal") or call.flag("causal") or "flex" in call.base:
        return True
    # Memory-efficient attention: from the upper left or from the lower right corner.
    if call.arguments.get("custom_mask_type", (0,))[0] in (1, 2):
        return True
    return _window(call)[1] == 0


def _share_in_window(call: KernelCall, keys: int) -> float:
    """Return the share of the keys that lie in a query's window."""
    left, right = _window(call)
    if left < 0 or right < 0:
        return 1.0
    return min(1.0, (left + 1 + right) / max(keys, 1))


def _window(call: KernelCall) -> tuple[int, int]:
    """Return the keys that a query sees on its left and right; -1: all."""
    left, right = (call.arguments.get(f"window_size_{side}", (-1,)) for side in ("left", "right"))
    return left[0], right[0]


def _extent(call: KernelCall, query: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, int, int]:
    """Return batch × heads, query length and key length.

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
