"""Stand-in for FlashAttention 2: the extension under ``flash_attn``.

Source: csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention (2.7 and newer). Caches of keys
and values are left out, because they are for inference.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.flash_attention.attention_sequences import (
    Mask,
    Sequences,
    packed,
    regular,
)
from prismscale.devices.null.libraries.launches import launch
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION = "flash_attn_2_cuda"
_ROUNDED = 128


def stand_in() -> StandIn:
    """Return the stand-in, which applies where the package's Python code is installed."""
    return StandIn(
        name="FlashAttention 2",
        namespace="flash_attn_2",
        modules={_EXTENSION: _module},
        python="flash_attn",
        distribution="flash-attn",
    )


def _module() -> ModuleType:
    functions = {"fwd": fwd, "bwd": bwd, "varlen_fwd": varlen_fwd, "varlen_bwd": varlen_bwd}
    return module_of(_EXTENSION, functions, library="FlashAttention 2")


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    *rest: Any,
) -> list[Tensor]:
    """Return output, row statistics, probabilities (if asked for) and random state."""
    sequences = regular(q, k, v, Mask(causal=causal, left=left, right=right))
    wants_probabilities = bool(rest[1]) if len(rest) > 1 else False
    return _forward(sequences, out, wants_probabilities=wants_probabilities)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, cu_q: Tensor, cu_k: Tensor, *rest: Any
) -> list[Tensor]:
    """As :func:`fwd`, for packed sequences; ``rest`` begins with optional tensors."""
    first = next(i for i, value in enumerate(rest) if isinstance(value, int))
    length, keys, _, _, zeroed, causal, left, right, *others = rest[first:]
    mask = Mask(causal=causal, left=left, right=right)
    sequences = packed(q, k, v, cu_q, length, keys, mask)
    wants_probabilities = bool(others[1]) if len(others) > 1 else False
    made = _forward(sequences, out, wants_probabilities=wants_probabilities)
    if zeroed:
        made[0].zero_()
    return made


def _forward(
    sequences: Sequences, out: Tensor | None, *, wants_probabilities: bool
) -> list[Tensor]:
    q = sequences.q
    out = torch.empty_like(q) if out is None else out
    rows = q.new_empty(sequences.rows(), dtype=torch.float32)
    probabilities = q.new_empty(0)
    if wants_probabilities:
        lengths = (-(-n // _ROUNDED) * _ROUNDED for n in (sequences.length, sequences.keys))
        probabilities = q.new_empty(sequences.batch, sequences.heads, *lengths)
    state = q.new_empty(2, dtype=torch.int64)
    launch(
        "flash_attn_2::fwd",
        sequences.cost(backward=False),
        reads=[q, sequences.k, sequences.v],
        writes=[out, rows, probabilities, state],
    )
    return [out, rows, probabilities, state]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    *_: Any,
) -> list[Tensor]:
    """Return the gradients of queries, keys and values, and the row sums of dP."""
    sequences = regular(q, k, v, Mask(causal=causal, left=left, right=right))
    return _backward(sequences, [dout, out, rows], [dq, dk, dv], deterministic=deterministic)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    alibi: Tensor | None,
    length: int,
    keys: int,
    dropout: float,
    scale: float,
    zeroed: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    *_: Any,
) -> list[Tensor]:
    """As :func:`bwd`, for packed sequences."""
    mask = Mask(causal=causal, left=left, right=right)
    sequences = packed(q, k, v, cu_q, length, keys, mask)
    return _backward(sequences, [dout, out, rows], [dq, dk, dv], deterministic=deterministic)


def _backward(
    sequences: Sequences,
    reads: list[Tensor],
    given: list[Tensor | None],
    *,
    deterministic: bool,
) -> list[Tensor]:
    """Launch the backward kernel, which needs a float32 accumulator of dQ.

    A deterministic one has as many accumulators as let every multiprocessor add to its own. With
    grouped queries it writes the gradients of keys and values for all query heads. They are
    then summed by group.
    """
    q, k, v = sequences.q, sequences.k, sequences.v
    grads = [
        torch.empty_like(tensor) if grad is None else grad
        for tensor, grad in zip((q, k, v), given, strict=True)
    ]
    rows = sequences.rows(rounded=_ROUNDED)
    sums = q.new_empty(rows, dtype=torch.float32)
    size = q.shape[-1]
    size = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    if deterministic:
        accumulator = q.new_zeros(_splits(sequences), *rows, size, dtype=torch.float32)
    else:
        accumulator = q.new_empty(*rows, size, dtype=torch.float32)
    groups = sequences.heads // k.shape[-2]
    expanded = [k.new_empty(*k.shape[:-2], sequences.heads, k.shape[-1]) for _ in range(2)]
    written = grads if groups == 1 else [grads[0], *expanded]
    if groups == 1:
        del expanded
    launch(
        "flash_attn_2::bwd",
        sequences.cost(backward=True, deterministic=deterministic),
        reads=[*reads, q, k, v],
        writes=[*written, sums, accumulator],
    )
    if groups > 1:
        for whole, grad in zip(written[1:], grads[1:], strict=True):
            by_group = whole.view(*grad.shape[:-1], groups, grad.shape[-1])
            torch.sum(by_group, dim=-2, out=grad)
    return [*grads, sums]


def _splits(sequences: Sequences) -> int:
    """Return the number of accumulators of dQ in a deterministic backward pass."""
    processors = torch.cuda.get_device_properties(sequences.q.device).multi_processor_count
    return -(-processors // (sequences.batch * sequences.heads))
