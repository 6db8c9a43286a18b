"""Installs the null device's CUDA graphs and memory pools in ``torch.cuda``."""

from __future__ import annotations

import ctypes
from types import CellType, FunctionType
from typing import Any

import torch

from prismscale.devices.null.graphs.mem_pools import PoolFunctions, mem_pool_class, user_pool_id
from prismscale.devices.null.graphs.null_graph import NullGraph


def install(library: ctypes.PyDLL) -> None:
    """Replace ``torch.cuda.CUDAGraph``, ``MemPool`` and the C functions that they call."""

    def is_capturing() -> bool:
        device = library.ps_current_device()
        return bool(library.ps_is_capturing(device, library.ps_current_stream(device)))

    NullGraph.library = library
    functions = PoolFunctions(library).table() | {
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_graph_pool_handle": user_pool_id,
        "_cuda_clearCublasWorkspaces": lambda: library.ps_clear_blas(),
        "_cuda_CUDAAllocator_AllocatorState": type(None),  # torch.compile's graph trees name it
        "_host_emptyCache": lambda: None,  # pinned memory is not cached
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
        for module in (torch.cuda.graphs, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, function)
    for module, name, base in (
        (torch.cuda.graphs, "CUDAGraph", NullGraph),
        (torch.cuda.memory, "MemPool", mem_pool_class(library)),
    ):
        cls = rebased(getattr(module, name), base)
        setattr(module, name, cls)
        setattr(torch.cuda, name, cls)


def rebased(cls: type[Any], base: type[Any]) -> type[Any]:
    """Return a copy of ``cls`` that derives from ``base``, not from a dummy or torch's C++ class.

    torch's own methods stay as they are. Methods that call ``super()`` refer to the class in which
    they were defined through a cell that they share. In the copy, this cell holds the copy itself.
    """
    cell = CellType()
    names = {
        name: _with_cell(value, cell)
        for name, value in vars(cls).items()
        if name not in ("__dict__", "__weakref__")
    }
    if "__new__" in names:
        base = type(
            base.__name__, (base,), {"__new__": lambda made, *_, **__: object.__new__(made)}
        )
    made = type(cls.__name__, (base,), names)
    cell.cell_contents = made
    return made


def _with_cell(value: Any, cell: CellType) -> Any:
    if isinstance(value, property):
        return property(*(_with_cell(f, cell) for f in (value.fget, value.fset, value.fdel)))
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(_with_cell(value.__func__, cell))
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    closure = tuple(
        cell if name == "__class__" else old
        for name, old in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    )
    function = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
    )
    function.__kwdefaults__ = value.__kwdefaults__
    function.__doc__ = value.__doc__
    return function
