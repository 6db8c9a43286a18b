"""Owners of a null device's blocks: named parameters, gradients and buffers, or optimizer state.

They are read from the program's own modules and optimizers, which are found among all objects that
Python's garbage collector tracks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

PARAMETERS, GRADIENTS, STATE, BUFFERS = "parameters", "gradients", "optimizer state", "buffers"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Owner(NamedTuple):
    """The kind and name of the tensor that a block holds."""

    kind: str
    name: str


class ProgramObjects:
    """The program's modules and optimizers, found once: the search takes a third of a second."""

    def __init__(self) -> None:
        # type(), not isinstance(): the latter reads __class__, which may run an object's own code.
        found = [
            o for o in gc.get_objects() if issubclass(type(o), (nn.Module, torch.optim.Optimizer))
        ]
        self._modules = [o for o in found if isinstance(o, nn.Module)]
        self._optimizers = [o for o in found if isinstance(o, torch.optim.Optimizer)]

    def __bool__(self) -> bool:
        return bool(self._modules) and bool(self._optimizers)

    def module_names(self) -> dict[int, str]:
        """Return module names by ``id``. The outermost module gives the full name."""
        names: dict[int, str] = {}
        for module in self._modules:
            for name, part in module.named_modules():
                names[id(part)] = max(names.get(id(part), ""), name, key=len)
        return {key: plain_name(name) for key, name in names.items()}

    def owners(self) -> dict[int, Owner]:
        """Return the owners by address of their storage."""
        named: dict[torch.Tensor, str] = {}
        buffers: dict[torch.Tensor, str] = {}
        for module in self._modules:
            _keep_longest(named, module.named_parameters())
            _keep_longest(buffers, module.named_buffers())
        found: dict[int, Owner] = {}
        for tensor, name in named.items():
            _add(found, tensor, Owner(PARAMETERS, name))
            _add(found, tensor.grad, Owner(GRADIENTS, name))
            # Megatron-LM accumulates gradients in main_grad.
            _add(found, getattr(tensor, "main_grad", None), Owner(GRADIENTS, name))
        for optimizer in self._optimizers:
            for tensor, part, value in _states(optimizer):
                name = f"{part} of {named.get(tensor, 'a tensor')}"
                _add(found, value, Owner(STATE, name))
        for tensor, name in buffers.items():
            _add(found, tensor, Owner(BUFFERS, name))
        return found


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without the parts that wrappers insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, Any]]:
    for tensor, state in optimizer.state.items():
        for part, value in state.items():
            yield tensor, part, value
    # Tensors of no module: an optimizer's own copies in another precision, and their gradients.
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            yield tensor, "own copy", tensor
            yield tensor, "gradient of own copy", tensor.grad


def _keep_longest(
    names: dict[torch.Tensor, str], found: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Keep each tensor's longest name in ``names``: the outermost module gives the full one."""
    for name, tensor in found:
        names[tensor] = max(names.get(tensor, ""), plain_name(name), key=len)


def _add(found: dict[int, Owner], tensor: Any, owner: Owner) -> None:
    for address in _addresses(getattr(tensor, "_local_tensor", tensor)):
        found.setdefault(address, owner)


def _addresses(tensor: Any) -> Iterator[int]:
    """Yield the addresses of the storages that hold a tensor."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return
    try:
        yield tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper without memory, such as a quantized weight
        for name in _parts(tensor):
            yield from _addresses(getattr(tensor, name))


def _parts(wrapper: torch.Tensor) -> list[str]:
    """Return the names of a wrapper's attributes that hold its data."""
    if hasattr(wrapper, "__tensor_flatten__"):
        return list(wrapper.__tensor_flatten__()[0])
    # Transformer Engine's wrappers have no such method; their data are in private attributes. What
    # others attach to a parameter (main_grad) is not its own data and has a public name.
    return [name for name in vars(wrapper) if name.startswith("_")]
