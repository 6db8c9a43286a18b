"""Rebuilds a runnable call from its signature.

A signature holds shapes, layouts, element types and integers. Everything else is made up: numbers
are 1, masks are random, and indices are legal for every dimension that they may be for. Lists of
tensors arrive flattened into one, which is divided evenly among the operator's lists. The backward
of fused attention runs through autograd, because it needs the forward's own outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from prismscale.cost.kernel_signature import KernelCall, TensorShape
from prismscale.errors import UsageError

Runnable = Callable[[], object]

DTYPES = {
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2": torch.float8_e5m2,
}
_ENDS_OF_PARTS = (
    *("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_flash_attention_forward"),
)
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def build_call(call: KernelCall, device: torch.device) -> Runnable:
    """Return a function that runs ``call`` on ``device``, with its tensors made beforehand.

    Raises:
        UsageError: the operator is not known here, or the signature does not determine the call;
            the message says which.
    """
    if call.base.startswith("_scaled_dot_product") and call.base.endswith("_backward"):
        return _attention_backward(call, device)
    operator = _operator(call)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument, value in _arguments(call, operator, device):
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)

    def run() -> object:
        return operator(*positional, **named)

    return run


def make_tensor(shape: TensorShape, device: torch.device, *, below: int) -> torch.Tensor:
    """Return a tensor of ``shape``; integers lie in 0 … ``below`` - 1, floats around 0."""
    if shape.dtype not in DTYPES:
        raise UsageError(f"element type {shape.dtype} cannot be made")
    dtype = DTYPES[shape.dtype]
    place = torch.device("cpu") if shape.on_cpu else device
    if shape.strides is None:
        tensor = torch.empty(shape.sizes, dtype=dtype, device=place)
    else:
        tensor = torch.empty_strided(shape.sizes, shape.strides, dtype=dtype, device=place)
    source = tensor
    if shape.strides is not None and 0 in shape.strides:
        # torch refuses to write through an expanded tensor, so its storage is filled instead.
        source = tensor.as_strided((tensor.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0)
    if dtype == torch.bool:
        source.bernoulli_()
    elif dtype.is_floating_point and dtype.itemsize == 1:
        source.copy_(torch.randn(source.shape, device=place).to(dtype))
    elif dtype.is_floating_point or dtype.is_complex:
        source.normal_()
    else:
        source.random_(0, max(1, min(below, torch.iinfo(dtype).max)))
    return tensor


def _operator(call: KernelCall) -> Any:
    namespace, _, rest = call.name.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    operator = getattr(packet, overload or "default", None)
    if operator is None:
        raise UsageError(f"no operator {call.name} here: import the library that registers it")
    return operator


def _arguments(call: KernelCall, operator: Any, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of the schema with its value."""
    schema = operator._schema.arguments
    tensors = _shared_out(call, schema, device)
    kinds = [str(argument.type) for argument in schema if "Tensor" in str(argument.type)]
    # A norm has a gradient of its weight or bias only if it has that weight or bias.
    optional = [
        tensor is not None
        for kind, tensor in zip(kinds, tensors, strict=True)
        if kind == "Optional[Tensor]"
    ]
    lists = sum("List" in kind for kind in kinds)
    for argument in schema:
        kind = str(argument.type)
        if "Tensor" in kind:
            yield argument, tensors.pop(0)
        elif argument.name in call.arguments:
            yield argument, _recorded(kind, call.arguments[argument.name])
        elif kind == "Optional[Device]" and not call.inputs:
            yield argument, device
        elif call.base == "clamp" and argument.name == "min":
            yield argument, 0.0  # clamp needs one of its two bounds
        elif argument.name == "output_mask":
            yield argument, [True, *optional][: len(operator._schema.returns)]
        elif argument.has_default_value():
            yield argument, argument.default_value
        else:
            yield argument, _unknown(call, argument.name, kind, lists)


def _recorded(kind: str, values: tuple[int, ...]) -> Any:
    if kind.startswith(("List", "Optional[List")):
        return list(values)
    return bool(values[0]) if "bool" in kind else values[0]


def _unknown(call: KernelCall, name: str, kind: str, lists: int) -> Any:
    if name == "momentum" and call.base == "_fused_sgd" and _is_empty(call, "momentum_buffer_list"):
        return 0.0
    if kind in ("number", "float", "Scalar", "complex"):
        return 1.0
    if kind in ("List[float]", "List[number]"):
        return [1.0] * (len(call.inputs) // max(lists, 1))
    if kind.startswith("Optional"):
        return None
    raise UsageError(f"{call.name}: its signature does not say what '{name}' ({kind}) was")


def _shared_out(call: KernelCall, schema: Any, device: torch.device) -> list[Any]:
    """Return the call's tensors by argument.

    A plain argument takes one tensor. Lists divide the others evenly; without lists, the optional
    arguments take them in order until none is left.
    """
    wanted = [argument for argument in schema if "Tensor" in str(argument.type)]
    kinds = ["" if _is_empty(call, a.name) else str(a.type) for a in wanted]
    needed = sum(kind == "Tensor" for kind in kinds)
    lists = sum("List" in kind for kind in kinds)
    made = _tensors(call, device)
    spare = len(made) - needed
    if spare < 0 or (lists and spare % lists):
        raise UsageError(
            f"{call.name}: {len(made)} tensors cannot be told apart among {len(kinds)} arguments"
        )
    out: list[Any] = []
    for kind in kinds:
        if not kind:
            out.append([])
        elif "List" in kind:
            out.append([made.pop(0) for _ in range(spare // lists)])
        elif kind == "Tensor":
            out.append(made.pop(0))
        else:
            takes = not lists and spare > 0
            out.append(made.pop(0) if takes else None)
            spare -= takes
    return out


def _is_empty(call: KernelCall, argument: str) -> bool:
    """Return whether ``argument`` is an empty list, because a fused optimizer keeps no such state.

    It keeps no largest moments without AMSGrad, and an SGD without momentum keeps no momentum.
    """
    if argument == "momentum_buffer_list":
        return len(call.inputs) % 3 != 0
    return argument == "max_exp_avg_sqs" and not call.flag("amsgrad")


def _tensors(call: KernelCall, device: torch.device) -> list[torch.Tensor]:
    # An index must be legal for every dimension of the first tensor, since any may be meant.
    sizes = call.inputs[0].sizes if call.inputs else ()
    below = min((size for size in sizes if size > 0), default=1)
    made = [make_tensor(shape, device, below=below) for shape in call.inputs]
    if call.base in _ENDS_OF_PARTS:
        rows = call.inputs[0].sizes[0]
        for tensor in made[2:]:
            if tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1:
                _fill_ends(tensor, rows, starts=call.base.startswith("_flash"))
    return made


def _fill_ends(tensor: torch.Tensor, rows: int, *, starts: bool) -> None:
    """Fill in the ends of even parts of ``rows``; with ``starts``, the first one's start, too."""
    first = 0 if starts else rows // max(tensor.numel(), 1)
    ends = torch.linspace(first, rows, tensor.numel()).round()
    tensor.copy_(ends.to(tensor.dtype))


def _attention_backward(call: KernelCall, device: torch.device) -> Runnable:
    family = next((name for name in _BACKENDS if name in call.base), None)
    if family is None:
        raise UsageError(
            f"{call.name}: known are the backwards of {', '.join(_BACKENDS)} attention"
        )
    gradient, *shapes = call.inputs[:4]
    q, k, v = (make_tensor(shape, device, below=1).requires_grad_() for shape in shapes)
    allowed = [_BACKENDS[family]] if device.type == "cuda" else list(_BACKENDS.values())
    with sdpa_kernel([*allowed, SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=call.flag("is_causal"), enable_gqa=q.size(1) != k.size(1)
        )
    grad = make_tensor(gradient, device, below=1)

    def run() -> object:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return run
