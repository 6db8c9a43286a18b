"""Whose a block of the null device is: parameters and states of wrappers, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from prismscale.devices.null.memory.memory_owners import GRADIENTS, PARAMETERS, ProgramObjects


class _Quantized(torch.Tensor):
    """A weight whose numbers and scales are tensors of their own, as Transformer Engine's are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> _Quantized:
        made: Any = torch.Tensor._make_wrapper_subclass
        return made(cls, data.shape, dtype=torch.bfloat16, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self._data, self._scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value._data.to(torch.bfloat16) if isinstance(value, cls) else value

        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def test_a_quantized_weight_is_what_it_is_made_of() -> None:
    """Its data and its scales are the parameter; what others hang on it is not."""
    data = torch.zeros(64, 64, dtype=torch.uint8, device="cuda")
    scale, gradient = torch.ones(64, device="cuda"), torch.zeros(64, 64, device="cuda")
    module = nn.Module()
    module.weight = nn.Parameter(_Quantized(data, scale))
    weight: Any = module.weight
    weight.main_grad = gradient
    optimizer = torch.optim.SGD([module.weight], lr=0.1)

    owners = ProgramObjects().owners()

    assert len(optimizer.param_groups) == 1
    assert owners[data.untyped_storage().data_ptr()] == (PARAMETERS, "weight")
    assert owners[scale.untyped_storage().data_ptr()] == (PARAMETERS, "weight")
    assert owners[gradient.untyped_storage().data_ptr()] == (GRADIENTS, "weight")
