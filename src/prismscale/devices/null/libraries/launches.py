"""Kernels of libraries that exist only as CUDA binaries, as operators of the null device.

A stand-in allocates the same tensors as the library's own code, with torch's factory functions, and
calls :func:`launch` where that code starts a kernel. Nothing is computed. The kernel is an operator
of ``torch.library``, so it reaches the dispatcher, the ledger of kernels and the recorder like any
other operator. Its overload and its last arguments state its cost::

    def project(x, weight):
        out = x.new_empty(x.shape[0], weight.shape[0])
        cost = gemm((1, x.shape[0], weight.shape[0], x.shape[1]))
        launch("my_kernels::project", cost, reads=[x, weight], writes=[out])
        return out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prismscale.cost.kernel_gemm import STATED_DTYPES
from prismscale.cost.kernel_kinds import STAND_IN_KINDS
from prismscale.errors import UsageError, did_you_mean

_SCHEMA = "(Tensor[] reads, Tensor(a!)[] writes, int[] extents, int launches, int bits) -> ()"
BITS = tuple(sorted((16, *STATED_DTYPES), reverse=True))
_libraries: dict[str, torch.library.Library] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of a kernel. Make one with :func:`gemm`, :func:`attention`, :func:`memory` or
    :func:`exchange`."""

    kind: str
    """Kind of kernel: a row of the GPU's kernel profile."""
    extents: tuple[int, ...] = ()
    """Numbers that determine the cost in addition to the tensors; their meaning depends on the
    kind."""
    launches: int = 1
    """Number of kernels that are started."""
    bits: int = 16
    """Bits of the floats that are multiplied: 32, 19 (TF32), 16, 8 or 4. With 16 the element type
    of the operands decides, so it also stands for wider floats."""

    def __post_init__(self) -> None:
        if self.kind not in STAND_IN_KINDS:
            advice = did_you_mean(self.kind, sorted(STAND_IN_KINDS))
            raise UsageError(f"kind of kernel {self.kind!r}; {advice}")
        if self.bits not in BITS:
            raise UsageError(f"bits is {self.bits}; it must be one of {', '.join(map(str, BITS))}")


def gemm(*products: tuple[int, int, int, int], bits: int = 16) -> Cost:
    """Return the cost of matrix products (batch, M, N, K) that run one after another."""
    return Cost(
        kind="gemm",
        extents=tuple(extent for product in products for extent in product),
        launches=len(products),
        bits=bits,
    )


def attention(
    *,
    batch_heads: int,
    length: int,
    keys: int,
    head_size: int,
    value_size: int,
    causal: bool,
    backward: bool = False,
    deterministic: bool = False,
    bits: int = 16,
) -> Cost:
    """Return the cost of fused attention with ``batch_heads`` × ``length`` × ``keys`` scores.

    A ``deterministic`` backward pass sums in a fixed order.
    """
    return Cost(
        kind="attention_backward" if backward else "attention",
        extents=(
            *(batch_heads, length, keys, head_size, value_size),
            int(causal),
            int(deterministic),
        ),
        bits=bits,
    )


def memory(kind: str, *, n_bytes: int | None = None, launches: int = 1) -> Cost:
    """Return the cost of a kernel bound by memory.

    ``kind`` is one of the profile's (``pointwise``, ``norm``, ``copy``). The kernel moves
    ``n_bytes`` if given, otherwise every tensor that it reads or writes, once.
    """
    extents = () if n_bytes is None else (n_bytes,)
    return Cost(kind=kind, extents=extents, launches=launches)


def exchange(*, moved: int, own: int, row_bytes: int, multiprocessors: int, combines: bool) -> Cost:
    """Return the cost of an exchange of tokens by a kernel with a few multiprocessors.

    Arguments are those of :meth:`~prismscale.cost.exchange.exchange_law.ExchangeLaw.time_ns`;
    ``combines`` says that tokens come back and are summed up.
    """
    extents = (moved, own, row_bytes, multiprocessors, int(combines))
    return Cost(kind="exchange", extents=extents)


def launch(
    name: str,
    cost: Cost,
    *,
    reads: Iterable[Tensor | None] = (),
    writes: Iterable[Tensor | None] = (),
) -> None:
    """Run the kernel ``name`` (``library::kernel``) on the current stream.

    Args:
        name: name of the kernel in reports.
        cost: cost of the kernel.
        reads: tensors whose values it uses; None and tensors on the host are left out.
        writes: tensors whose values it computes; None and tensors on the host are left out.

    Raises:
        UsageError: ``name`` does not have the form ``library::kernel``.
    """
    with torch._C._AutoDispatchBelowAutograd():  # the library's own code defines the gradient
        _operator(name, cost.kind)(
            _on_device(reads), _on_device(writes), list(cost.extents), cost.launches, cost.bits
        )


def _on_device(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]


@cache
def _operator(
    name: str, kind: str
) -> Callable[[Sequence[Tensor], Sequence[Tensor], Any, int, int], None]:
    space, separator, kernel = name.partition("::")
    if not (separator and space.isidentifier() and kernel.isidentifier()):
        raise UsageError(f"kernel {name!r}; name its library too, such as my_kernels::scale")
    library = _libraries.get(space)
    if library is None:
        library = _libraries[space] = torch.library.Library(space, "FRAGMENT")
    library.define(f"{kernel}.{kind}{_SCHEMA}")
    library.impl(f"{kernel}.{kind}", lambda *_: None, "Meta")
    return getattr(getattr(getattr(torch.ops, space), kernel), kind)
