"""Products of Transformer Engine's extension."""

from __future__ import annotations

from typing import Any

import torch

from prismscale.devices.null.libraries.transformer_engine.enums import DType
from prismscale.devices.null.libraries.transformer_engine.products import generic_gemm


def gemm(a: Any, transa: bool, b: Any, transb: bool, **given: Any) -> list[Any]:
    """``b`` times ``a`` in bf16, without bias and epilogue but for what is ``given``."""
    arguments: dict[str, Any] = {
        "out": None,
        "quantizer": None,
        "output_dtype": DType.kBFloat16,
        "bias": None,
        "bias_type": DType.kBFloat16,
        "gelu": False,
        "gelu_in": None,
        "grad": False,
        "workspace": torch.empty(1, dtype=torch.uint8, device="cuda"),
        "workspace_size": 1,
        "accumulate": False,
        "use_split_accumulator": False,
    }
    return list(generic_gemm(a, transa, b, transb, **arguments | given))
