"""DeepSpeed's fused optimizers, which its ``op_builder`` compiles from CUDA sources.

Nothing is compiled here: the builder finds the operators already loaded, under the names that they
have where DeepSpeed was installed with them (``DS_BUILD_FUSED_ADAM=1``). Source: csrc/adam and
csrc/lion of DeepSpeed 0.19.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from prismscale.devices.null.libraries import multi_tensor
from prismscale.devices.null.libraries.stand_in import StandIn, module_of

_MODULES = {
    "fused_adam": ("deepspeed.ops.adam.fused_adam_op", "multi_tensor_adam"),
    "fused_lion": ("deepspeed.ops.lion.fused_lion_op", "multi_tensor_lion"),
}
"""Module of each operator, and the function in it, by the operator's name."""


def stand_in() -> StandIn:
    """Return the stand-in."""
    makers: dict[str, Callable[[], ModuleType]] = {
        module: partial(_make, module, function) for module, function in _MODULES.values()
    }
    return StandIn(
        name="DeepSpeed's operators",
        namespace="deepspeed",
        modules=makers,
        python="deepspeed",
        distribution="deepspeed",
        around={"deepspeed.ops.op_builder.builder": _loaded},
    )


def _make(module: str, function: str) -> ModuleType:
    """Return the module of an operator.

    Its function takes lists of gradients, parameters and moments: one list of moments for Lion, two
    for Adam.
    """
    step = multi_tensor.update("deepspeed", function)
    return module_of(module, {function: step}, library="DeepSpeed's operators")


class _Loaded(dict[str, Any]):
    """DeepSpeed's record of loaded operators; those of ``_MODULES`` are in it from the start."""

    def __contains__(self, name: object) -> bool:
        return name in _MODULES or super().__contains__(name)

    def __missing__(self, name: str) -> ModuleType:
        module, _ = _MODULES[name]
        self[name] = importlib.import_module(module)
        return self[name]


@contextmanager
def _loaded(builder: Any) -> Iterator[None]:
    yield
    builder.OpBuilder._loaded_ops = _Loaded(builder.OpBuilder._loaded_ops)
