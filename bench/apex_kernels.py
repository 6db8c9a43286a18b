"""Stand-ins for the kernels of other libraries that megatron-core's local layers run on a GPU.

Apex and Transformer Engine cannot be built without CUDA. These have their functions' names, and
allocate and keep what their kernels do, in torch operators; on the null device nothing else of them
can be seen. ``install`` before megatron-core is imported.

- ``scaled_upper_triang_masked_softmax_cuda`` and ``scaled_masked_softmax_cuda``: one output
  forward; the backward writes into the gradient that it is given.
- ``FusedLayerNormAffineFunction``: keeps its input, mean and inverse deviation (float32).
- ``FusedAdam``: two float32 moments a parameter, updated without temporaries.
- ``general_gemm`` (Transformer Engine, for the router of experts): a workspace of its own, which
  stays, of 32 MiB on Hopper.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Let ``import apex`` and its kernel modules find the stand-ins."""
    for name in ("scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda"):
        _module(name, forward=lambda scores, scale: torch.empty_like(scores), backward=_in_place)
    _module(
        "scaled_masked_softmax_cuda",
        forward=lambda scores, mask, scale: torch.empty_like(scores),
        backward=_in_place,
        get_batch_per_block=lambda queries, keys, batch, heads: 4,
    )
    _module("apex")
    _module("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    _module("apex.normalization")
    _module(
        "apex.normalization.fused_layer_norm",
        FusedLayerNormAffineFunction=FusedLayerNormAffineFunction,
    )


def _module(name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    module.__path__ = []  # a package, whose submodules come next
    sys.modules[name] = module


def _in_place(gradient: Tensor, softmax: Tensor, scale: Tensor) -> Tensor:
    return gradient.mul_(softmax)


_workspaces: list[Tensor] = []


def general_gemm(
    first: Tensor, second: Tensor, dtype: torch.dtype, *, layout: str = "TN", **_: Any
) -> tuple[Tensor]:
    """``second`` times ``first`` in BLAS order: the letters say which of the two is transposed."""
    if not _workspaces:
        _workspaces.append(torch.empty(32 << 20, dtype=torch.uint8, device=first.device))
    left, right = second.flatten(0, -2).to(dtype), first.flatten(0, -2).to(dtype)
    if layout == "NT":
        return (left.t() @ right,)
    return (left @ (right.t() if layout == "TN" else right),)


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Layer norm with weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        shape: Iterable[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        output, mean, deviation = torch.native_layer_norm(inputs, list(shape), weight, bias, eps)
        ctx.save_for_backward(inputs, weight, bias, mean, deviation)
        ctx.shape = list(shape)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, mean, deviation = ctx.saved_tensors
        grads = torch.ops.aten.native_layer_norm_backward(
            gradients[0].contiguous(), inputs, ctx.shape, mean, deviation, weight, bias, [True] * 3
        )
        return *grads, None, None, None


class FusedAdam(torch.optim.Optimizer):
    """Adam as one kernel over all parameters."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the moments at the first step; update in place."""
        for group in self.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            for parameter in updated:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if updated:
                torch._foreach_add_([p.data for p in updated], [p.grad for p in updated])
