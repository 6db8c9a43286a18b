"""Reading signature texts."""

from __future__ import annotations

import pytest

from prismscale.cost.kernel_signature import FIELD, KernelCall, TensorShape, parse_signature
from prismscale.errors import FormatError


def text(name: str, inputs: str = "", outputs: str = "", arguments: str = "") -> str:
    """A signature from its four fields."""
    return FIELD.join((name, inputs, outputs, arguments))


def test_fields_are_read() -> None:
    """Name, tensors with layout and place, and integer arguments."""
    call = parse_signature(
        text("aten::add_.Tensor", "Float[2,3]@1,2;Half[]!cpu;none", "Float[2,3]", "dim=1;s=2,3")
    )

    assert call.inputs == (
        TensorShape(dtype="Float", sizes=(2, 3), strides=(1, 2)),
        TensorShape(dtype="Half", sizes=(), on_cpu=True),
    )
    assert call.outputs == (TensorShape(dtype="Float", sizes=(2, 3)),)
    assert call.arguments == {"dim": (1,), "s": (2, 3)}


@pytest.mark.parametrize(
    ("name", "base", "overload", "in_place"),
    [
        ("aten::add_.Tensor", "add", "Tensor", True),
        ("aten::_foreach_add_.List", "_foreach_add", "List", True),
        ("aten::mm", "mm", "", False),
        ("aten::__lshift__.Scalar", "__lshift__", "Scalar", True),
        ("mine::scale.out", "mine::scale", "out", False),
    ],
)
def test_names_are_taken_apart(name: str, base: str, overload: str, in_place: bool) -> None:
    """Namespace, overload and the mark of working in place."""
    call = KernelCall(name=name)

    assert (call.base, call.overload) == (base, overload)
    assert call.in_place is in_place


@pytest.mark.parametrize(
    "bad",
    [
        "aten::mm",
        text(""),
        text("aten::mm", "Float"),
        text("aten::mm", "Float[2,x]"),
        text("aten::mm", "Float[2,3]@1"),
        text("aten::mm", "Float[2]!", ""),
        text("aten::mm", "", "", "dim"),
        text("aten::mm", "", "", "dim=a"),
    ],
)
def test_damaged_texts_are_refused(bad: str) -> None:
    """What is not a signature raises and says what was expected."""
    with pytest.raises(FormatError, match="signature"):
        parse_signature(bad)


def test_expanded_dimensions_hold_bytes_once() -> None:
    """A stride of 0 repeats memory; an empty tensor has none."""
    assert TensorShape(dtype="Float", sizes=(8, 4), strides=(0, 1)).n_bytes == 16
    assert TensorShape(dtype="Float", sizes=(0, 4), strides=(4, 1)).n_bytes == 0
    assert TensorShape(dtype="Float8_e4m3fn", sizes=(8, 4)).n_bytes == 32
