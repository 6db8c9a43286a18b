"""Stand-in for causal-conv1d's ``causal_conv1d_cuda``, under the library's own Python code.

The Python code allocates outputs and gradients, and the extension fills them. A deterministic
backward pass also allocates temporary partial sums of the weight's gradient, for each sequence, or
for each piece of a sequence if channels lie last. Source: csrc/causal_conv1d.cpp of causal-conv1d
1.6.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_EXTENSION = "causal_conv1d_cuda"
_SPACE = "causal_conv1d::"
_SHORT = 128
_DETERMINISTIC = "CAUSAL_CONV1D_DETERMINISTIC"


def stand_in() -> StandIn:
    """Return the stand-in."""
    return StandIn(
        name="causal-conv1d",
        namespace="causal_conv1d",
        modules={_EXTENSION: _make_extension},
        python="causal_conv1d",
        distribution="causal-conv1d",
    )


def _make_extension() -> ModuleType:
    content = {
        "causal_conv1d_fwd": causal_conv1d_fwd,
        "causal_conv1d_bwd": causal_conv1d_bwd,
        "causal_conv1d_update": causal_conv1d_update,
    }
    return module_of(_EXTENSION, content, library="causal-conv1d")


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    out: Tensor,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> None:
    """Fill ``out``, which has the shape of ``x``: (batch, channels, length)."""
    launch(
        f"{_SPACE}causal_conv1d_fwd",
        memory("pointwise"),
        reads=[x, weight, bias, seq_idx, initial_states],
        writes=[out, final_states_out],
    )


def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    dinitial_states: Tensor | None,
    silu_activation: bool,
) -> None:
    """Fill the gradients; add to those of weight and bias, which are in float32."""
    sums = _partial_sums(x, weight, dbias is not None) if _is_deterministic() else []
    launch(
        f"{_SPACE}causal_conv1d_bwd",
        memory("pointwise"),
        reads=[x, weight, bias, grad, seq_idx, initial_states, dfinal_states],
        writes=[dx, dweight, dbias, dinitial_states, *sums],
    )
    for total, parts in zip((dweight, dbias), sums, strict=False):
        if total is not None:
            total.add_(parts.sum(tuple(range(parts.dim() - total.dim()))))


def _is_deterministic() -> bool:
    chosen = os.environ.get(_DETERMINISTIC, "")[:1]
    if chosen in ("0", "1"):
        return chosen == "1"
    return torch.are_deterministic_algorithms_enabled()


def _partial_sums(x: Tensor, weight: Tensor, has_bias: bool) -> list[Tensor]:
    batch, channels, length = x.shape
    pieces: tuple[int, ...] = ()
    if x.stride(1) == 1 and x.stride(2) > 1:
        pieces = (-(-length // (_SHORT // 2 if length <= _SHORT else _SHORT)),)
    shapes = [(batch, *pieces, channels, weight.shape[1])]
    if has_bias:
        shapes.append((batch, *pieces, channels))
    return [torch.zeros(shape, dtype=torch.float32, device=x.device) for shape in shapes]


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *rest: Any
) -> None:
    """Run one step of inference: fill ``out`` and advance the state."""
    launch(
        f"{_SPACE}causal_conv1d_update",
        memory("pointwise"),
        reads=[x, conv_state, weight, bias],
        writes=[out, conv_state],
    )
