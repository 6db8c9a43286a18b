"""cuDNN's fused attention, and kernels that prepare tensors for other attention kernels.

The extension's argument lists grew from version to version; the number of arguments of a call tells
which list it has. Source: pytorch/csrc/extensions/attention.cpp and
common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu of Transformer Engine 2.2 to 2.18.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.flash_attention.attention_sequences import (
    Mask,
    lengths_alike,
)
from prismscale.devices.null.libraries.launches import attention, launch, memory
from prismscale.devices.null.libraries.transformer_engine.casts import unquantized_with_amax
from prismscale.devices.null.libraries.transformer_engine.enums import (
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    formats_of,
    torch_dtype,
)
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    CURRENT,
    MXFP8,
    bits_of,
    buffers,
    create,
    empty_as,
    is_quantized,
    recipe_of,
    shape_of,
)
from prismscale.devices.null.libraries.transformer_engine.versions import is_since

_TE = "transformer_engine::"
_CAUSAL_MASKS = (2, 3, 4, 5)
_NO_BIAS, _ALIBI = 0, 3
_HEAD = "max_seqlen_q max_seqlen_kv {training} attn_scale p_dropout set_zero qkv_layout {formats}"
_MIDDLE = "bias_type mask_type {softmax} window {diagonal} {deterministic} cu_seqlens_q"
_FORWARD_TAIL = """cu_seqlens_kv q k v fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded
    page_table_k page_table_v s_quantizer o_quantizer bias {offset} rng_gen rng_elts_per_thread
    {max_logit} {graph}"""
_BACKWARD_TAIL = """cu_seqlens_kv q k v o d_o fake_dtype {dtype} aux_tensors cu_seqlens_q_padded
    cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer {graph}"""
_FORWARD = f"{_HEAD} {_MIDDLE} {_FORWARD_TAIL}"
_BACKWARD = f"{_HEAD} {_MIDDLE} {_BACKWARD_TAIL}"


def _names(text: str, **parts: str) -> tuple[str, ...]:
    left_out = dict.fromkeys(("training", "formats", "diagonal", "deterministic"), "")
    newest = {
        "softmax": "softmax_type",
        "offset": "softmax_offset",
        "max_logit": "return_max_logit",
        "graph": "cuda_graph",
    }
    parts = {**left_out, **newest, **parts}
    return tuple(text.format(**parts).split())


def _by_count(*lists: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    return {len(names): names for names in lists}


_OLD = {"max_logit": "", "graph": ""}
_FORWARD_ARGUMENTS = _by_count(
    _names(_FORWARD, training="is_training", softmax="", offset="", **_OLD),  # 2.2
    _names(_FORWARD, training="is_training", **_OLD),  # 2.8
    _names(_FORWARD, training="is_training", graph=""),  # 2.9
    _names(_FORWARD, training="is_training"),
    _names(_FORWARD, training="is_training", diagonal="bottom_right_diagonal"),
    _names(
        _FORWARD,
        training="is_training",
        formats="o_format scale_inv_format",
        diagonal="bottom_right_diagonal",
    ),
)
_BACKWARD_ARGUMENTS = _by_count(
    _names(_BACKWARD, deterministic="deterministic", dtype="dqkv_dtype", softmax="", graph=""),
    _names(_BACKWARD, deterministic="deterministic", dtype="dqkv_dtype", graph=""),  # 2.8
    _names(_BACKWARD, deterministic="deterministic", dtype="dqkv_dtype"),
    _names(
        _BACKWARD,
        diagonal="bottom_right_diagonal",
        deterministic="deterministic",
        dtype="dqkv_dtype",
    ),
    _names(
        _BACKWARD,
        formats="o_format do_format dqkv_layout scale_inv_format do_scale_inv_format",
        diagonal="bottom_right_diagonal",
        deterministic="deterministic",
        dtype="",
    ),
)


def _bind(lists: dict[int, tuple[str, ...]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    names = lists.get(len(arguments))
    if names is None:
        known = ", ".join(map(str, sorted(lists)))
        raise NotImplementedError(
            f"fused attention was called with {len(arguments)} arguments; prismscale's stand-in "
            f"for Transformer Engine knows lists of {known} (versions 2.2 and newer)"
        )
    absent = {"softmax_type": 0, "softmax_offset": None, "return_max_logit": False}
    return absent | dict(zip(names, arguments, strict=True))


def fused_attn_fwd(*arguments: Any) -> list[Any]:
    """Return the output, then what the backward pass needs: statistics and the random state."""
    call = _bind(_FORWARD_ARGUMENTS, arguments)
    q, v, quantizer = call["q"], call["v"], call["o_quantizer"]
    fp8 = is_quantized(q)
    shape = _in_format((*shape_of(q)[:-1], shape_of(v)[-1]), _query_format(call), _out_format(call))
    if recipe_of(quantizer) == CURRENT:
        out, _ = unquantized_with_amax(quantizer, shape, call["fake_dtype"])
    else:
        out = create(_of_outputs(quantizer), shape, call["fake_dtype"])
    if len(shape) == 3 and not fp8:
        out.zero_()
    state = empty_as([2], torch.int64)
    launch(f"{_TE}philox_unpack", memory("fill"), writes=[state])
    statistics = [empty_as(_statistics_shape(call), torch.float32)]
    if call["return_max_logit"] or (fp8 and not is_since(2, 16)):
        statistics.append(torch.empty_like(statistics[0]))
    reads = [buffer for tensor in (q, call["k"], v) for buffer in buffers(tensor)]
    launch(
        f"{_TE}fused_attn_fwd",
        _cost(call, backward=False),
        reads=[*reads, call["bias"]],
        writes=[*buffers(out), *statistics],
    )
    kept = [*statistics, state]
    if call["bias_type"] not in (_NO_BIAS, _ALIBI) and call["bias"] is not None:
        kept.append(call["bias"])
    if call["softmax_type"] != 0 and call["softmax_offset"] is not None:
        kept.append(call["softmax_offset"])
    return [out, *kept]


def _of_outputs(quantizer: Any) -> Any:
    """Return the quantizer of the output; None for MXFP8, whose outputs stay in 16 bits."""
    return None if recipe_of(quantizer) == MXFP8 else quantizer


def _query_format(call: dict[str, Any]) -> str:
    return formats_of(call["qkv_layout"])[0]


def _out_format(call: dict[str, Any]) -> str:
    given = call.get("o_format")
    if given is None:
        return _query_format(call)
    return NVTE_QKV_Format(int(given)).name.removeprefix("NVTE_").lower()


def _in_format(shape: tuple[int, ...], given: str, wanted: str) -> tuple[int, ...]:
    sizes = dict(zip(given, shape, strict=True))
    return tuple(sizes[name] for name in wanted)


def _heads(call: dict[str, Any]) -> int:
    query = shape_of(call["q"])
    return query[_query_format(call).index("h")]


def _statistics_shape(call: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the statistics, which are one number for each row of scores.

    It is (batch, heads, queries, 1), or (tokens, heads, 1) if packed.
    """
    query = shape_of(call["q"])
    if len(query) == 3:
        return (query[0], query[1], 1)
    return (call["cu_seqlens_q"].shape[0] - 1, _heads(call), call["max_seqlen_q"], 1)


def _cost(call: dict[str, Any], *, backward: bool) -> Any:
    query, value = shape_of(call["q"]), shape_of(call["v"])
    length, keys, heads = call["max_seqlen_q"], call["max_seqlen_kv"], _heads(call)
    batch = call["cu_seqlens_q"].shape[0] - 1
    if len(query) == 3:
        length, keys = lengths_alike(call["cu_seqlens_q"], length, keys)
        batch = max(1, query[0] // max(length, 1))
    left, right = call["window"]
    mask = Mask(causal=int(call["mask_type"]) in _CAUSAL_MASKS, left=left, right=right)
    keys, causal = mask.of_keys(keys)
    return attention(
        batch_heads=batch * heads,
        length=length,
        keys=keys,
        head_size=query[-1],
        value_size=value[-1],
        causal=causal,
        backward=backward,
        deterministic=bool(call.get("deterministic")),
        bits=bits_of(call["q"]),
    )


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    """Return the gradients of queries, keys, values, bias and softmax offset."""
    call = _bind(_BACKWARD_ARGUMENTS, arguments)
    quantizer = call["dqkv_quantizer"]
    fp8 = is_quantized(call["q"])
    dtype = call["fake_dtype"]
    if "dqkv_dtype" in call and recipe_of(quantizer) != CURRENT:
        dtype = torch_dtype(call["dqkv_dtype"])
    grads = _gradients(call, torch.uint8 if dtype.itemsize == 1 else dtype)
    if len(shape_of(call["q"])) == 3 and not fp8:
        for grad in grads:
            grad.zero_()
    bias = None
    if call["bias_type"] not in (_NO_BIAS, _ALIBI):
        bias = empty_as(call["aux_tensors"][-1].shape, dtype)
    offset = None
    if call["softmax_type"] != 0:
        offset = empty_as((1, _heads(call), 1, 1), torch.float32)
    workspace = empty_as([_backward_workspace_bytes(call)], torch.uint8)
    inputs = (call["d_o"], call["q"], call["k"], call["v"], call["o"])
    reads = [buffer for tensor in inputs for buffer in buffers(tensor)]
    launch(
        f"{_TE}fused_attn_bwd",
        _cost(call, backward=True),
        reads=[*reads, *call["aux_tensors"]],
        writes=[*grads, bias, offset],
    )
    del workspace
    return [*_as_quantized(call, grads, quantizer), bias, offset]


def _as_quantized(call: dict[str, Any], grads: list[Tensor], quantizer: Any) -> list[Any]:
    """Return the gradients: in tensors of ``quantizer`` with delayed scaling, else as they are."""
    if recipe_of(quantizer) in ("", CURRENT, MXFP8):
        return list(grads)
    wrapped = []
    for grad in grads:
        tensor = create(quantizer, grad.shape, call["fake_dtype"])
        tensor._data = grad
        wrapped.append(tensor)
    return wrapped


def _gradients(call: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Return empty gradients of queries, keys and values, interleaved as their layout has it."""
    given, wanted = call["qkv_layout"], call.get("dqkv_layout", call["qkv_layout"])
    (of_q, of_kv), (of_dq, of_dkv) = formats_of(given), formats_of(wanted)
    shapes = [
        _in_format(shape_of(call["q"]), of_q, of_dq),
        *(_in_format(shape_of(call[name]), of_kv, of_dkv) for name in ("k", "v")),
    ]
    group = NVTE_QKV_Layout(int(wanted)).name.lower().removeprefix("nvte_")
    if "3" in group:
        return _interleaved(shapes[0], 3, _place(group, "3"), dtype)
    if "2" in group:
        pair = _interleaved(shapes[1], 2, _place(group.split("_")[1], "2"), dtype)
        return [empty_as(shapes[0], dtype), *pair]
    return [empty_as(shape, dtype) for shape in shapes]


def _place(layout: str, count: str) -> int:
    """Return the dim, from the end, of the ``count``: before the heads, or before their size."""
    return -3 if layout.endswith(f"{count}hd") else -2


def _interleaved(
    shape: tuple[int, ...], count: int, place: int, dtype: torch.dtype
) -> list[Tensor]:
    at = len(shape) + 1 + place
    whole = empty_as((*shape[:at], count, *shape[at:]), dtype)
    return list(whole.unbind(at))


def _backward_workspace_bytes(call: dict[str, Any]) -> int:
    """Return the bytes of the backward pass's workspace.

    It holds a float32 accumulator of dQ, the row sums of dP and, with grouped queries, dK and dV of
    all query heads (cudnn-frontend's graph of the backward pass).
    """
    query, key = shape_of(call["q"]), shape_of(call["k"])
    rows, size, heads = math.prod(query[:-1]), query[-1], _heads(call)
    needed = 4 * rows + 4 * rows * size
    groups = key[formats_of(call["qkv_layout"])[1].index("h")]
    if groups != heads:
        needed += 2 * 2 * math.prod(key[:-1]) // groups * heads * size
    return -(-needed // 16) * 16


def fa_prepare_fwd(qkv: Tensor) -> Tensor:
    """Copy (length, batch, heads, 3 × size) to (3, batch, length, heads, size)."""
    length, batch, heads, size = qkv.shape
    out = empty_as((3, batch, length, heads, size), qkv.dtype)
    launch(f"{_TE}fa_prepare_fwd", memory("strided_copy"), reads=[qkv], writes=[out])
    return out


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reverse :func:`fa_prepare_fwd`."""
    first, second, heads, size = q.shape
    out = empty_as((second, first, heads, 3 * size), q.dtype)
    launch(f"{_TE}fa_prepare_bwd", memory("strided_copy"), reads=[q, k, v], writes=[out])
    return out


def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[Tensor | None],
    original_format: str,
    outputs: Sequence[Tensor | None] = (),
) -> list[Tensor | None]:
    """Transpose from ``sbhd`` or ``bshd``, into ``outputs`` where given; None stays None."""
    found: list[Tensor | None] = []
    for tensor, out in zip_longest(inputs, outputs):
        if tensor is not None and out is None:
            shape = _in_format(tuple(tensor.shape), original_format, "bhsd")
            out = empty_as(shape, tensor.dtype)
        found.append(out)
    reads = [tensor for tensor in inputs if tensor is not None]
    if reads:
        cost = memory("strided_copy")
        launch(f"{_TE}multi_tensor_transpose_to_bhsd", cost, reads=reads, writes=found)
    return found


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Unpack sequences: return a tensor of (batch, length, …)."""
    out = empty_as((batch, length, *tensor.shape[1:]), tensor.dtype)
    launch(f"{_TE}convert_thd_to_bshd", memory("copy"), reads=[tensor, cu_seqlens], writes=[out])
    return out


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Pack sequences: return a tensor of (tokens, …)."""
    out = empty_as((tokens, *tensor.shape[2:]), tensor.dtype)
    launch(f"{_TE}convert_bshd_to_thd", memory("copy"), reads=[tensor, cu_seqlens], writes=[out])
    return out


FUNCTIONS = {
    "fused_attn_fwd": fused_attn_fwd,
    "fused_attn_bwd": fused_attn_bwd,
    "fa_prepare_fwd": fa_prepare_fwd,
    "fa_prepare_bwd": fa_prepare_bwd,
    "multi_tensor_transpose_to_bhsd": multi_tensor_transpose_to_bhsd,
    "convert_thd_to_bshd": convert_thd_to_bshd,
    "convert_bshd_to_thd": convert_bshd_to_thd,
}
