"""Signatures of GPU calls: the operator, the shapes read and written, and the integer arguments.

The text is made by the null device (``describe_call`` in its ``csrc/signature.cpp``): four fields
separated by the unit separator, U+001F::

    aten::addmm ␟ Float[16];Float[8,4];Float[4,16]@1,4 ␟ Float[8,16] ␟ name=1;dims=0,1

Tensor lists are flattened. A tensor is ``dtype[sizes]``, then ``@strides`` where it is not
contiguous, then ``!cpu`` where it lies in host memory, or ``!peer`` where it lies in that of
another GPU. A tensor that is not there is ``none``.

A kernel of a library's stand-in states how it is costed. Its overload is the kind of kernel, and
three arguments hold its extents, launches and bits: see
``prismscale.devices.null.libraries.launches``::

    transformer_engine::generic_gemm.gemm ␟ … ␟ ␟ extents=1,4096,12288,4096;launches=1;bits=16
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from prismscale.errors import FormatError

FIELD = "\x1f"
_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](?:@([\d,]*))?(!\w+)?")
TORCH_DTYPES = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Float": "float32",
    "TF32": "tfloat32",
    "Double": "float64",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
    "Float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "Char": "int8",
}
"""Torch's names of the element types of matrix products, by their C++ names."""
_ITEM_BYTES = {
    "Bool": 1,
    "Byte": 1,
    "Char": 1,
    "Short": 2,
    "UInt16": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "UInt32": 4,
    "Float": 4,
    "TF32": 4,
    "ComplexHalf": 4,
    "Long": 8,
    "UInt64": 8,
    "Double": 8,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShape:
    """Element type (as C++ spells it: ``BFloat16``), sizes, and strides where not contiguous."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    on_cpu: bool = False
    on_peer: bool = False
    """Whether the tensor is in the memory of another GPU of the node."""

    @property
    def elements(self) -> int:
        """Number of elements of the tensor, expanded dimensions included."""
        return math.prod(self.sizes)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; the 8-bit and narrower floats count 1."""
        return item_bytes(self.dtype)

    @property
    def n_bytes(self) -> int:
        """Bytes in memory behind the tensor; an expanded dimension (stride 0) counts once."""
        if self.strides is None:
            return self.elements * self.item_bytes
        if 0 in self.sizes:
            return 0
        kept = (size for size, stride in zip(self.sizes, self.strides, strict=True) if stride)
        return math.prod(kept) * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One distinct call, as its signature describes it."""

    name: str
    """Operator with namespace and overload: ``aten::add.Tensor``."""
    inputs: tuple[TensorShape, ...] = ()
    outputs: tuple[TensorShape, ...] = ()
    arguments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Integer arguments: integers and flags as tuples of one, integer lists as tuples."""

    @property
    def base(self) -> str:
        """The operator's name without overload and without the in-place underscore: ``add``.

        Operators of other libraries than ATen keep their namespace: ``fused::scale``.
        """
        name = self.name.removeprefix("aten::").partition(".")[0]
        return name if name.endswith("__") else name.rstrip("_")

    @property
    def namespace(self) -> str:
        """``aten``, or the library that has the operator."""
        return self.name.partition("::")[0]

    @property
    def overload(self) -> str:
        """The overload, ``Tensor`` in ``aten::add.Tensor``; empty where there is none."""
        return self.name.partition(".")[2]

    @property
    def is_library(self) -> bool:
        """Whether the operator is from another library than ATen."""
        return "::" in self.base

    @property
    def in_place(self) -> bool:
        """Whether the operator writes into its first argument."""
        return self.name.partition(".")[0].endswith("_")

    def flag(self, name: str) -> bool:
        """Return a boolean argument; one that was left out is false."""
        return self.arguments.get(name, (0,))[:1] == (1,)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; the 8-bit and narrower floats count 1."""
    return _ITEM_BYTES.get(dtype, 1)


def parse_signature(text: str) -> KernelCall:
    """Parse the text of a signature.

    Raises:
        FormatError: ``text`` is not a signature; the message names the part that cannot be read.
    """
    fields = text.split(FIELD)
    if len(fields) != 4 or not fields[0]:
        raise FormatError(
            f"{text[:80]!r} is no kernel signature: expected the operator's name, its inputs, its "
            f"outputs and its arguments, separated by U+001F; got {len(fields)} fields"
        )
    name, inputs, outputs, arguments = fields
    return KernelCall(
        name=name,
        inputs=_tensors(inputs),
        outputs=_tensors(outputs),
        arguments=dict(_argument(part) for part in arguments.split(";") if part),
    )


def _tensors(text: str) -> tuple[TensorShape, ...]:
    return tuple(_tensor(part) for part in text.split(";") if part not in ("", "none"))


def _tensor(text: str) -> TensorShape:
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise FormatError(f"{text!r} is no tensor of a kernel signature, such as Float[8,4]@1,8")
    dtype, sizes, strides, place = match.groups()
    shape = TensorShape(
        dtype=dtype,
        sizes=_integers(sizes),
        strides=None if strides is None else _integers(strides),
        on_cpu=place == "!cpu",
        on_peer=place == "!peer",
    )
    if shape.strides is not None and len(shape.strides) != len(shape.sizes):
        counts = f"{len(shape.sizes)} sizes and {len(shape.strides)} strides"
        raise FormatError(f"{text!r} in a kernel signature has {counts}")
    return shape


def _argument(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise FormatError(f"{text!r} is no argument of a kernel signature, such as dim=1,2")
    return name, _integers(values)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise FormatError(f"{text!r} is no list of integers in a kernel signature") from error
