"""Costs of the Triton kernels of known libraries.

The null device sees their launches like those of any Triton kernel, so shapes and memory need no
rule. The time of a kernel depends on what it does with its tensors, which its name tells if its
library is known. Sources: ``transformer_engine/{pytorch,common}/triton`` (2.9 to 2.11) and
``megatron/core/fusions`` of Megatron-LM (0.14 to 0.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from prismscale.devices.null.libraries.launches import Cost, memory


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule for the cost of a kernel of one of the profile's kinds."""

    kind: str
    passes: int = 1
    """Passes over the bytes of its tensors; two if it overwrites what it reads."""


_ROTATE = _Rule("pointwise")
_RULES: Mapping[str, Mapping[str, _Rule]] = {
    "transformer_engine": {
        "online_softmax_kernel": _Rule("reduction"),
        "cross_entropy_kernel": _Rule("softmax_backward", passes=2),
        "element_mul_kernel": _Rule("pointwise", passes=2),
        "zero_pad_kernel": _Rule("copy"),
        "_row_id_map_pass_1_kernel": _Rule("scan"),
        "_row_id_map_pass_2_kernel": _Rule("scan"),
        "_row_id_map_pass_3_kernel": _Rule("sort"),
        "_permute_kernel": _Rule("index"),
        "_unpermute_kernel": _Rule("index"),
        "_unpermute_bwd_with_merging_probs_kernel": _Rule("index"),
        "_make_chunk_sort_map_kernel": _Rule("scan"),
        "_sort_chunks_by_map_kernel": _Rule("index"),
    },
    "megatron": {
        "rotary_fwd_q_kernel": _ROTATE,
        "rotary_bwd_q_kernel": _ROTATE,
        "rotary_fwd_kv_kernel": _ROTATE,
        "rotary_bwd_kv_kernel": _ROTATE,
        "_mla_rope_fwd_inplace_kernel": _ROTATE,
        "_mla_rope_bwd_inplace_kernel": _ROTATE,
        "_mla_rope_fwd_kv_split_kernel": _ROTATE,
        "_mla_rope_bwd_kv_split_kernel": _ROTATE,
        "_indices_to_multihot_kernel": _Rule("index"),
        "_multihot_to_indices_kernel": _Rule("index"),
        "_pad_routing_map_kernel": _Rule("scan", passes=2),
    },
}
"""Rules by package and kernel name. A rotation of queries in place reads and writes only a part of
each head, which is about one pass."""


def known_cost(module: str, name: str, tensors: Iterable[Tensor]) -> Cost | None:
    """Return the cost of the kernel ``name`` that ``module`` defines; None if it is unknown."""
    rule = _RULES.get(module.partition(".")[0], {}).get(name)
    if rule is None:
        return None
    return memory(rule.kind, n_bytes=rule.passes * sum(tensor.nbytes for tensor in tensors))
