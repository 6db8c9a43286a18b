"""Triton kernels of known libraries are costed by what they do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prismscale.devices.null import custom_kernels, value_policy
from support import op_log

TE = "transformer_engine.common.triton"


@pytest.mark.parametrize(
    ("name", "module", "kind", "n_bytes"),
    [
        ("cross_entropy_kernel", f"{TE}.cross_entropy", "softmax_backward", 64),
        ("_permute_kernel", f"{TE}.permutation", "index", 32),
        (
            "rotary_fwd_kv_kernel",
            "megatron.core.fusions.fused_mla_yarn_rope_apply",
            "pointwise",
            32,
        ),
    ],
)
def test_a_known_kernel_has_a_kind_and_bytes(
    name: str, module: str, kind: str, n_bytes: int
) -> None:
    """Twice the bytes where it overwrites what it reads; what its tensors held is forgotten."""
    record, out = _launched(name, module)

    assert record.signature.name == f"triton::{name}.{kind}"
    assert record.signature.arguments["extents"] == (n_bytes,)
    assert value_policy.known(out) is None


def test_a_kernel_of_that_name_elsewhere_is_unknown() -> None:
    """It may do anything: this one has no source that could be followed."""
    record, _ = _launched("_permute_kernel", "my_kernels.permutation")

    assert record.signature.name == "triton::_permute_kernel"


def _launched(name: str, module: str) -> tuple[op_log.OpRecord, torch.Tensor]:
    def source(rows: Any, out: Any) -> None: ...

    source.__name__, source.__module__ = name, module
    rows, out = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    kernel = SimpleNamespace(fn=source)
    (record,) = op_log.ops_of(lambda: custom_kernels.launch_source(kernel, (rows, out), {}, (1,)))
    return record, out
