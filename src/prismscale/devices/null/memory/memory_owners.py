"""What blocks of a null device are to the program: parameters and their gradients by name, an
optimizer's state. The program's own objects say so; they are looked for among all objects that
Python knows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

PARAMETERS, GRADIENTS, STATE, BUFFERS = "parameters", "gradients", "optimizer state", "buffers"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Owner(NamedTuple):
    """What a block is to the program."""

    kind: str
    name: str


class ProgramObjects:
    """Modules and optimizers of the program, as found once: looking takes a third of a second."""

    def __init__(self) -> None:
        # By type: asking a stranger's object for its class may run the stranger's code.
        found = [
            o for o in gc.get_objects() if issubclass(type(o), (nn.Module, torch.optim.Optimizer))
        ]
        self._modules = [o for o in found if isinstance(o, nn.Module)]
        self._optimizers = [o for o in found if isinstance(o, torch.optim.Optimizer)]

    def __bool__(self) -> bool:
        return bool(self._modules) and bool(self._optimizers)

    def module_names(self) -> dict[int, str]:
        """By ``id``; the outermost module gives the whole name."""
        names: dict[int, str] = {}
        for module in self._modules:
            for name, part in module.named_modules():
                names[id(part)] = max(names.get(id(part), ""), name, key=len)
        return {key: plain_name(name) for key, name in names.items()}

    def owners(self) -> dict[int, Owner]:
        """By address of the storage."""
        named: dict[torch.Tensor, str] = {}
        buffers: dict[torch.Tensor, str] = {}
        for module in self._modules:
            _keep_longest(named, module.named_parameters())
            _keep_longest(buffers, module.named_buffers())
        found: dict[int, Owner] = {}
        for tensor, name in named.items():
            _add(found, tensor, Owner(PARAMETERS, name))
            _add(found, tensor.grad, Owner(GRADIENTS, name))
            # Where Megatron-LM accumulates.
            _add(found, getattr(tensor, "main_grad", None), Owner(GRADIENTS, name))
        for optimizer in self._optimizers:
            for tensor, part, value in _states(optimizer):
                name = f"{part} of {named.get(tensor, 'a tensor')}"
                _add(found, value, Owner(STATE, name))
        for tensor, name in buffers.items():
            _add(found, tensor, Owner(BUFFERS, name))
        return found


def plain_name(name: str) -> str:
    """Without the names that wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, Any]]:
    for tensor, state in optimizer.state.items():
        for part, value in state.items():
            yield tensor, part, value
    # What is no module's: copies that an optimizer keeps in another precision, and their gradients.
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            yield tensor, "own copy", tensor
            yield tensor, "gradient of own copy", tensor.grad


def _keep_longest(
    names: dict[torch.Tensor, str], found: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Every module names its own; the outermost gives the whole name."""
    for name, tensor in found:
        names[tensor] = max(names.get(tensor, ""), plain_name(name), key=len)


def _add(found: dict[int, Owner], tensor: Any, owner: Owner) -> None:
    for address in _addresses(getattr(tensor, "_local_tensor", tensor)):
        found.setdefault(address, owner)


def _addresses(tensor: Any) -> Iterator[int]:
    """Of the storages that hold a tensor."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return
    try:
        yield tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper without memory, such as a quantized weight
        for name in _parts(tensor):
            yield from _addresses(getattr(tensor, name))


def _parts(wrapper: torch.Tensor) -> list[str]:
    """Attributes of a wrapper in which its data are."""
    if hasattr(wrapper, "__tensor_flatten__"):
        return list(wrapper.__tensor_flatten__()[0])
    # Transformer Engine's have no such method. What others hang on a parameter is no data of its
    # own, and has a public name: main_grad.
    return [name for name in vars(wrapper) if name.startswith("_")]
