"""Stand-in for FlashAttention 3: the operators that ``flash_attn_3._C`` registers on import.

Source: hopper/flash_api.cpp of Dao-AILab/flash-attention (2026-08). Caches of keys and values are
left out, because they are for inference.

torch's own attention runs on these operators after ``activate_flash_attention_impl("FA3")``. It
needs none of the library's Python code, so it gets them even where that is not installed.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.libraries.flash_attention.attention_sequences import (
    Mask,
    Sequences,
    packed,
    regular,
)
from prismscale.devices.null.libraries.import_finder import StandInFinder
from prismscale.devices.null.libraries.launches import launch
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION = "flash_attn_3._C"
NO_CACHES = "prismscale's stand-in for FlashAttention 3 has no caches of keys and values"
_HEADS = (64, 96, 128, 192, 256)
_SCHEMAS = {
    "fwd": """(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None,
        Tensor? q_v=None, Tensor? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
        Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
        int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None,
        Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,
        Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
        Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None,
        bool is_causal=False, int window_size_left=-1, int window_size_right=-1,
        int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False,
        Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0)
        -> (Tensor, Tensor, Tensor, Tensor)""",
    "bwd": """(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
        Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None,
        Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,
        Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,
        float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,
        int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0)
        -> (Tensor, Tensor, Tensor, Tensor, Tensor)""",
}
_operators: list[torch.library.Library] = []


def stand_in() -> StandIn:
    """Return the stand-in, which applies where the package's Python code is installed."""
    return StandIn(
        name="FlashAttention 3",
        namespace="flash_attn_3",
        modules={_EXTENSION: _module},
        python="flash_attn_3",
        distribution="flash_attn_3",
    )


def serve_torch(finder: StandInFinder) -> None:
    """Let torch find the stand-in when it imports the library by name."""
    Watcher({"torch.nn.attention._fa3": partial(_serve, finder)}).begin()


def _serve(finder: StandInFinder, registry: Any) -> None:
    import_installed = registry._fa3_import_module

    def import_module(name: str) -> None:
        """Import ``name`` for torch only.

        The program's own ``import`` still fails where nothing is installed.
        """
        if find_spec(name.partition(".")[0]) is not None:
            import_installed(name)
            return
        sys.modules[name] = loaded(finder)
        try:
            import_installed(name)
        finally:
            del sys.modules[name]

    registry._fa3_import_module = import_module


def loaded(finder: StandInFinder) -> ModuleType:
    """Return the extension, for callers of its operators that lack the library's Python code."""
    return finder.make(_EXTENSION, stand_in())


def _module() -> ModuleType:
    """Register the operators, and return the module, which is empty."""
    if _operators:
        return module_of(_EXTENSION, {}, library="FlashAttention 3")
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name, function in (("fwd", _forward), ("bwd", _backward)):
        library.define(name + " ".join(_SCHEMAS[name].split()))
        library.impl(name, function, "CUDA")
    _operators.append(library)  # the operators last as long as this object
    return module_of(_EXTENSION, {}, library="FlashAttention 3")


def _sequences(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> Sequences:
    left, right = call["window_size_left"], call["window_size_right"]
    mask = Mask(causal=call["is_causal"], left=left, right=right)
    cu = call["cu_seqlens_q"]
    if cu is None:
        return regular(q, k, v, mask)
    return packed(q, k, v, cu, call["max_seqlen_q"], call["max_seqlen_k"], mask)


def output_dtype(q: Tensor) -> torch.dtype:
    """Return the type of the attention's result: bfloat16 for queries of 8 bits."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def _forward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """Return output, row statistics, and two tensors that only split keys need."""
    call = _bound("fwd", arguments, named)
    q, k, v = call["q"], call["k"], call["v"]
    if call["k_new"] is not None or call["page_table"] is not None:
        raise NotImplementedError(NO_CACHES)
    sequences = _sequences(q, k, v, call)
    out = call["out"]
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=output_dtype(q))
    rows = q.new_empty(sequences.rows(), dtype=torch.float32)
    launch(
        "flash_attn_3::forward",
        sequences.cost(backward=False),
        reads=[q, k, v],
        writes=[out, rows],
    )
    return out, rows, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


def _backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """Return row sums of dP, row statistics to base 2, and three float32 accumulators.

    Those of keys and values are empty unless queries are grouped.
    """
    call = _bound("bwd", arguments, named)
    q, k, v = call["q"], call["k"], call["v"]
    sequences = _sequences(q, k, v, call)
    grads = [
        torch.empty_like(tensor) if call[name] is None else call[name]
        for tensor, name in ((q, "dq"), (k, "dk"), (v, "dv"))
    ]
    size = next(s for s in _HEADS if s >= max(q.shape[-1], v.shape[-1]))
    rows = sequences.rows(rounded=_query_block(size, causal=sequences.mask.is_causal))
    sums = [q.new_empty(rows, dtype=torch.float32) for _ in range(2)]
    accumulators = [q.new_empty(*rows, size, dtype=torch.float32)]
    if sequences.heads != k.shape[-2]:
        shape = (*k.shape[:-2], k.shape[-2], size)
        accumulators += [torch.zeros(shape, dtype=torch.float32, device=q.device) for _ in "kv"]
    launch(
        "flash_attn_3::backward",
        sequences.cost(backward=True, deterministic=call["deterministic"]),
        reads=[call["dout"], call["out"], call["softmax_lse"], q, k, v],
        writes=[*grads, *sums, *accumulators],
    )
    while len(accumulators) < 3:
        accumulators.append(q.new_empty(0, dtype=torch.float32))
    return *sums, *accumulators


def _query_block(size: int, *, causal: bool) -> int:
    """Return the number of queries of one thread block on Hopper."""
    if size <= 64:
        return 128
    return 80 if size == 128 and not causal else 64


def _bound(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by name, including defaults."""
    schema = getattr(torch.ops.flash_attn_3, name).default._schema
    call = {argument.name: argument.default_value for argument in schema.arguments}
    call |= dict(zip(call, arguments, strict=False))
    return call | named
