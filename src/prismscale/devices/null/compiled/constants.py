"""Constants with which a generated kernel fills a tensor: ``torch.full``, ``torch.tensor([n])``.

A program may ask for such a value (``.item()``) after the kernel has run, with an all-reduce over
ranks in between. The null device does not run the kernel's code, which is why the value is noted
when the code is written.
"""

from __future__ import annotations

import math
from typing import Any

from torch._inductor import ir


def constants_of_arguments(kernel: Any) -> dict[str, float]:
    """Return the constants by argument name, for a ``SIMDKernel`` whose code is being written."""
    from torch._inductor.lowering import get_constant_value  # at module level: a circular import

    found = {}
    for node in kernel.features.scheduler_nodes():
        body = getattr(node.node, "data", None)
        constant = get_constant_value(body) if isinstance(body, ir.Pointwise) else None
        if constant is not None and _is_literal(constant.value):
            found[node.node.get_name()] = constant.value
    names, buffers, *_ = kernel.args.python_argdefs()
    by_argument = zip((argument.name for argument in names), buffers, strict=True)
    return {name: found[buffer] for name, buffer in by_argument if buffer in found}


def _is_literal(value: object) -> bool:
    """Return whether the kernel's source can state the value; inductor writes it as Python does."""
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
