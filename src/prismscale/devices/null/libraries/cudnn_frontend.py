"""cuDNN frontend's fused grouped GEMMs of experts, from which Transformer Engine makes a layer.

The library's Python code is installed, but it compiles its kernels for a GPU at their first call.
The number of rows of each expert lies on the device. If it is known, each expert's product is
costed with its own rows; otherwise all experts count as equally large. Source:
cudnn/gemm/cutedsl/grouped of cuDNN frontend 1.32, and the calls of Transformer Engine 2.18 to it
and to earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.launches import gemm, launch
from prismscale.devices.null.libraries.stand_in import StandIn

_NAME = "cudnn_frontend::grouped_gemm_"
_BLOCK = 128
"""Rows of a block of scales, which also spans four groups of columns."""
_FP4 = torch.float4_e2m1fn_x2
Results = dict[str, Tensor | None]


def stand_in() -> StandIn:
    """Return the stand-in, which replaces only the grouped products."""
    return StandIn(
        name="cuDNN frontend",
        namespace="cudnn_frontend",
        modules={},
        python="cudnn",
        distribution="nvidia-cudnn-frontend",
        around={"cudnn": _with_products},
    )


@contextmanager
def _with_products(module: Any) -> Iterator[None]:
    yield
    for name, function in FUNCTIONS.items():
        setattr(module, f"grouped_gemm_{name}_wrapper_sm100", function)


def activated(**given: Any) -> Results:
    """Run a product and a gated activation of its result, which halves the columns."""
    return _activated("glu", given, halves=True)


def squared(**given: Any) -> Results:
    """Run a product and a squared ReLU of its result."""
    return _activated("srelu", given, halves=False)


def hadamard(**given: Any) -> Results:
    """Run a product and an activation, whose result has 16 bits.

    Also return the largest values before and after a Hadamard transform.
    """
    made = _activated("glu_hadamard", given, halves=given.get("act_func") != "srelu")
    experts, device = given["padded_offsets"].numel(), given["a_tensor"].device
    for name in ("amax_tensor", "post_rht_amax_tensor"):
        made[name] = torch.empty(experts, 1, dtype=torch.float32, device=device)
    return made


def activated_backward(**given: Any) -> Results:
    """Run a product, and the gradient of an activation whose output gradient is the product."""
    return _backward("dglu", given)


def squared_backward(**given: Any) -> Results:
    """As :func:`activated_backward`, for a squared ReLU, whose result it may also recompute."""
    made = _backward("dsrelu", given)
    if given.get("use_dsrelu_reuse"):
        rows, columns = _rows(given["a_tensor"]), given["c_tensor"].shape[1]
        made["d_srelu_tensor"] = _matrix(rows, columns, given["d_dtype"], given)
        made["sfd_col_d_srelu_tensor"] = _scales(columns, rows, given)
    return made


def plain(**given: Any) -> Results:
    """Run a product into the caller's tensor, or into a new one if none is given."""
    out = given.get("d_tensor")
    if out is None:
        out = _matrix(_rows(given["a_tensor"]), _columns(given), given["d_dtype"], given)
    _multiply("quant", given, _columns(given), [out])
    return {"d_tensor": out}


def weight_gradient(**given: Any) -> Results:
    """Compute the weight gradient of each expert, which is a product over the expert's rows.

    It goes into the caller's tensor, or into the tensors whose addresses the caller gives.
    """
    a, b, out = given["a_tensor"], given["b_tensor"], given.get("wgrad_tensor")
    rows_of = _rows_of_experts(given["offsets_tensor"], a.shape[1] * _packed(a))
    products = [(1, a.shape[0], b.shape[1], rows) for rows in rows_of if rows]
    if products:
        _launch("wgrad", products, given, [out])
    return {"wgrad_tensor": out}


def _activated(name: str, given: Mapping[str, Any], *, halves: bool) -> Results:
    rows, inner = _rows(given["a_tensor"]), _columns(given)
    outer = inner // 2 if halves else inner
    made: Results = {
        "c_tensor": _matrix(rows, inner, given["c_dtype"], given),
        **_quantised("d_tensor", "d_col_tensor", rows, outer, given),
    }
    _multiply(name, given, inner, made.values())
    return made


def _backward(name: str, given: Mapping[str, Any]) -> Results:
    rows, outer = _rows(given["a_tensor"]), given["c_tensor"].shape[1]
    made = _quantised("d_row_tensor", "d_col_tensor", rows, outer, given)
    made["dbias_tensor"] = None
    if given.get("generate_dbias"):
        experts = given["padded_offsets"].numel()
        made["dbias_tensor"] = _matrix(experts, outer, torch.bfloat16, given)
    made["dprob_tensor"] = given["dprob_tensor"]
    _multiply(name, given, _columns(given), made.values())
    return made


def _quantised(
    by_rows: str, by_columns: str, rows: int, columns: int, given: Mapping[str, Any]
) -> Results:
    """Return an 8-bit result with a scale per 32 elements along rows and along columns.

    A result of 16 bits has no scales.
    """
    dtype = given["d_dtype"]
    found: Results = {by_rows: _matrix(rows, columns, dtype, given)}
    if dtype.itemsize == 1:
        found[by_columns] = _matrix(rows, columns, dtype, given)
        found["sfd_row_tensor"] = _scales(rows, columns, given)
        found["sfd_col_tensor"] = _scales(columns, rows, given)
    return found


def _matrix(rows: int, columns: int, dtype: torch.dtype, given: Mapping[str, Any]) -> Tensor:
    device = given["a_tensor"].device
    return torch.empty(1, rows, columns, dtype=dtype, device=device).permute(1, 2, 0)


def _scales(rows: int, columns: int, given: Mapping[str, Any]) -> Tensor:
    """Return scales in the tensor cores' layout: 32 × 4 × 4 per 128 rows and four column groups."""
    blocks = (-(-rows // _BLOCK), -(-columns // (4 * given["sf_vec_size"])))
    dtype, device = torch.float8_e8m0fnu, given["a_tensor"].device
    made = torch.empty(1, *blocks, 32, 4, 4, dtype=dtype, device=device)
    return made.permute(3, 4, 1, 5, 2, 0)


def _multiply(
    name: str, given: Mapping[str, Any], columns: int, writes: Iterable[Tensor | None]
) -> None:
    a = given["a_tensor"]
    inner = a.shape[1] * _packed(a)
    rows_of = _rows_of_experts(given["padded_offsets"], _rows(a))
    products = [(1, rows, columns, inner) for rows in rows_of if rows]
    if products:
        _launch(name, products, given, writes)


def _launch(
    name: str,
    products: list[tuple[int, int, int, int]],
    given: Mapping[str, Any],
    writes: Iterable[Tensor | None],
) -> None:
    a = given["a_tensor"]
    each = {product[1:] for product in products}
    if len(each) == 1:
        products = [(len(products), *products[0][1:])]
    reads = [a, given.get("sfa_tensor"), given.get("b_tensor"), given.get("c_tensor")]
    cost = replace(gemm(*products, bits=4 if a.dtype == _FP4 else 8), launches=1)
    launch(f"{_NAME}{name}", cost, reads=reads, writes=writes)


def _rows(a: Tensor) -> int:
    return int(a.shape[0])


def _columns(given: Mapping[str, Any]) -> int:
    """Return the number of columns of a product, which is that of the weights' rows."""
    weights = given.get("b_tensor")
    return int(given["n"] if weights is None else weights.shape[0])


def _packed(tensor: Tensor) -> int:
    """Return how many numbers one element of ``tensor`` holds."""
    return 2 if tensor.dtype == _FP4 else 1


def _rows_of_experts(ends: Tensor, rows: int) -> list[int]:
    """Return each expert's rows from their end offsets; equal shares if these are unknown."""
    known = value_policy.known(ends)
    if known is None:
        return [rows // ends.numel()] * ends.numel()
    return [int(n) for n in torch.diff(known, prepend=known.new_zeros(1))]


FUNCTIONS: Mapping[str, Callable[..., Results]] = {
    "glu": activated,
    "srelu": squared,
    "glu_hadamard": hadamard,
    "dglu": activated_backward,
    "dsrelu": squared_backward,
    "quant": plain,
    "wgrad": weight_gradient,
}
"""Replacements, by the part of their name between ``grouped_gemm_`` and ``_wrapper_sm100``."""
