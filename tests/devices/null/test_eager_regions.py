"""What the program compiles and the null device runs operator by operator is named."""

from __future__ import annotations

import pytest

from support.null_program import null_program

PROGRAM = """
import torch
from prismscale.devices.null.compiled import eager_regions
@torch.compile(dynamic=False)
def wave(x):
    return x.sin() + 1
model = torch.nn.Linear(8, 8, device="cuda")
model.compile(backend="inductor", fullgraph=True)
model(wave(torch.ones(8, device="cuda")))
for region in eager_regions.found():
    print(region.region, region.reason, region.count, sep=": ")
"""


@pytest.mark.parametrize(
    ("before", "options", "reason"),
    [
        ("import sys; sys.modules['triton'] = None", "", "Triton is missing"),
        ("", ", lower=False", "--fused costs it by a rule"),
    ],
)
def test_without_inductor_regions_run_eagerly_and_are_named(
    before: str, options: str, reason: str
) -> None:
    """Without Triton, and where the rule of --fused is asked for: functions and modules."""
    functions, modules = null_program(PROGRAM, before=before, options=options).splitlines()

    assert functions.startswith(f"wave: {reason}")
    assert modules.startswith(f"Linear._call_impl: {reason}")


def test_a_user_may_switch_dynamo_off() -> None:
    """Then regions are no concern of ours."""
    assert null_program(PROGRAM, TORCHDYNAMO_DISABLE="1") == ""


RETRACED = """
import torch
from prismscale.devices.null.compiled import eager_regions
@torch.compile
def drop(x, residual, rate):
    return residual + torch.nn.functional.dropout(x, p=rate, training=True)
x = torch.ones(8, device="cuda", requires_grad=True)
drop(x, x, 0.1)
drop(x, x, 0.0)
print(eager_regions.found())
"""


def test_tracing_once_more_is_no_failure() -> None:
    """A number that must be a constant after all: inductor asks dynamo to trace again."""
    assert null_program(RETRACED) == "[]\n"
