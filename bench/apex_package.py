"""What megatron-core imports of Apex's Python code, over prismscale's stand-in for its kernels.

Apex is on no package index. Where it is installed its own code is used, and here only its kernels
are answered for; elsewhere ``install`` also makes the modules that megatron-core's local layers
look for. Call it before megatron-core is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries import apex
from prismscale.devices.null.libraries.import_finder import StandInFinder


def install(finder: StandInFinder) -> None:
    """Let ``import apex`` and its kernels find something."""
    if importlib.util.find_spec("apex") is not None:
        return
    finder.add([replace(apex.stand_in(), python="")])
    _module("apex")
    _module("apex.normalization")
    _module(
        "apex.normalization.fused_layer_norm",
        FusedLayerNormAffineFunction=FusedLayerNormAffineFunction,
    )


def _module(name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    module.__path__ = []  # a package, whose submodules come next
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    sys.modules[name] = module


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Layer norm with weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        kernels: Any = importlib.import_module("fused_layer_norm_cuda")
        inputs = inputs.contiguous()
        output, mean, deviation = kernels.forward_affine(inputs, shape, weight, bias, eps)
        ctx.save_for_backward(inputs, weight, bias, mean, deviation)
        ctx.shape, ctx.eps = shape, eps
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Any = importlib.import_module("fused_layer_norm_cuda")
        inputs, weight, bias, mean, deviation = ctx.saved_tensors
        grads = kernels.backward_affine(
            *(gradients[0].contiguous(), mean, deviation, inputs, ctx.shape, weight, bias),
            *(ctx.eps, False),
        )
        return *grads, None, None, None
