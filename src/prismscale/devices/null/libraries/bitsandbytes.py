"""Stand-in for the CUDA library of bitsandbytes, under its own Python code.

The Python code calls C functions with addresses. Optimizers get these from one function, which here
returns the tensors themselves. The other calls state the number of elements that they work on.
Source: csrc/pythonInterface.cpp and backends/cuda/ops.py of bitsandbytes 0.50.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import Cost, gemm, launch, memory
from prismscale.devices.null.libraries.stand_in import StandIn

_SPACE = "bitsandbytes::"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Element types by what names of functions call them."""
_GIVEN = {
    "8bit_blockwise": ("p", "g", "state1", "state2", *[""] * 7, "map1", "map2", "max1", "max2"),
    "32bit": ("g", "p", "state1", "state2", "norm"),
}
"""Names of the tensors among the arguments of an optimizer's function; others are empty."""
_NOT_WRITTEN = ("g", "map1", "map2", "")


def stand_in() -> StandIn:
    """Return the stand-in, which has no modules: the library is loaded as a shared object."""
    return StandIn(
        name="bitsandbytes",
        namespace="bitsandbytes",
        modules={},
        python="bitsandbytes",
        distribution="bitsandbytes",
        around={
            "bitsandbytes.cextension": _library_in_place,
            "bitsandbytes.functional": _tensors_for_addresses,
        },
    )


@contextmanager
def _library_in_place(_: Any) -> Iterator[None]:
    load = ctypes.cdll.LoadLibrary
    ctypes.cdll.LoadLibrary = lambda name: NativeLibrary()  # type: ignore[method-assign,assignment,return-value]
    try:
        yield
    finally:
        ctypes.cdll.LoadLibrary = load  # type: ignore[method-assign]


@contextmanager
def _tensors_for_addresses(functional: Any) -> Iterator[None]:
    yield
    functional.get_ptr = lambda tensor: tensor


class NativeLibrary:
    """The library's C functions, by name; each takes ``argtypes`` and ``restype`` as in ctypes."""

    def __getattr__(self, name: str) -> Any:
        return _function(name)


@cache
def _function(name: str) -> Any:
    return _Function(name, _meaning(name))


class _Function(SimpleNamespace):
    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        super().__init__(name=name)
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(self.name, *arguments)


def _meaning(name: str) -> Callable[..., Any]:
    """Return the handler of the C function ``name``; that of an unknown name raises an error."""
    if name == "get_context":
        return lambda *_: 0
    for part, run in _BY_NAME.items():
        if part in name:
            return run
    return _refuse


def _optimizer(name: str, *arguments: Any) -> None:
    kind = next(kind for kind in _GIVEN if kind in name)
    given = dict(zip(_GIVEN[kind], arguments, strict=False))
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    written = [tensor for key, tensor in tensors.items() if key not in _NOT_WRITTEN]
    launch(_SPACE + name, memory("optimizer"), reads=tensors.values(), writes=written)


def _quantize(
    name: str, code: Any, source: Any, absmax: Any, out: Any, block: int, count: int, *_: Any
) -> None:
    """Convert ``count`` elements to or from 8 or 4 bits each, with one float32 per block."""
    small = 0.5 if name.endswith("4") else 1
    n_bytes = int(count * (small + _dtype(name).itemsize)) + 4 * -(-count // block)
    _launch_by_size(name, memory("pointwise", n_bytes=n_bytes))


def _product(name: str, context: Any, m: int, n: int, k: int, *_: Any) -> int:
    """Multiply 8-bit integers; return 0, which means no error."""
    _launch_by_size(name, gemm((1, n, m, k), bits=8))
    return 0


def _product_with_vector(name: str, m: int, n: int, k: int, *_: Any) -> None:
    """Multiply weights of 4 bits by one row."""
    _launch_by_size(name, memory("pointwise", n_bytes=m * k // 2 + 2 * n * (m + k)))


def _product_of_four_bits(name: str, *arguments: Any) -> None:
    """Run a 4-bit product; its arguments are eight addresses, then M, N and K."""
    m, n, k = arguments[8:11]
    # The second tensor says what is multiplied.
    factor = torch.empty(0, device="cuda", dtype=_dtype(name))
    launch(_SPACE + name, gemm((1, m, n, k)), reads=[factor], writes=[factor])


def _dequantize_product(
    name: str, source: Any, rows_of: Any, columns_of: Any, out: Any, bias: Any, *rest: int
) -> None:
    """Convert a product from int32 to 16 bits."""
    rows, columns = rest[:2]
    _launch_by_size(name, memory("pointwise", n_bytes=6 * rows * columns))


def _quantize_rows(
    name: str, source: Any, out: Any, stats: Any, threshold: Any, rows: int, columns: int, *_: Any
) -> None:
    """Convert elements from 16 to 8 bits, with one float32 per row."""
    _launch_by_size(name, memory("reduction", n_bytes=3 * rows * columns + 4 * rows))


def _dtype(name: str) -> torch.dtype:
    return next(dtype for word, dtype in _DTYPES.items() if f"_{word}" in name)


def _launch_by_size(name: str, cost: Cost) -> None:
    # The operator takes its device from a tensor; this one has no elements.
    launch(_SPACE + name, cost, writes=[torch.empty(0, device="cuda")])


def _refuse(name: str, *_: Any) -> None:
    raise NotImplementedError(
        f"prismscale's stand-in for bitsandbytes has no {name}: its optimizers and its quantized "
        "layers run on the device, but nothing on the host, and no paged memory"
    )


_BY_NAME: dict[str, Callable[..., Any]] = {
    "32bit_grad": _optimizer,
    "8bit_blockwise_grad": _optimizer,
    "cquantize_blockwise_cpu": _refuse,
    "cdequantize_blockwise_cpu": _refuse,
    "quantize_blockwise": _quantize,
    "cigemmlt_32": _product,
    "cgemm_4bit_inference": _product_with_vector,
    "cgemm_4bit": _product_of_four_bits,
    "cdequant_mm_int32": _dequantize_product,
    "cint8_vector_quant": _quantize_rows,
}
"""Handlers by a part of the function's name; the first match counts."""
