"""Which frames torch.compile may trace."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch._dynamo import trace_rules

from prismscale.emulation import entry_points
from prismscale.emulation.untraced import PACKAGE
from support.emulation import emulated

KERNELS = PACKAGE / "devices" / "null" / "kernel_ledger.py"
STAND_IN = PACKAGE / "devices" / "null" / "libraries" / "flash_attention" / "hub_interface.py"


@pytest.mark.parametrize("path", [entry_points.__file__, str(KERNELS)])
def test_the_emulations_own_frames_are_not_traced(path: str) -> None:
    """While it runs: what torch has in C++ is no Python to be compiled."""
    with emulated():
        assert trace_rules.check_file(path).skipped
    assert not trace_rules.check_file(path).skipped


def test_stand_ins_for_python_are_traced() -> None:
    """As the Python that they stand for."""
    with emulated():
        assert not trace_rules.check_file(str(STAND_IN)).skipped


def test_a_communication_between_two_regions_is_not_compiled() -> None:
    """The regions are the program's two; the call between them runs as it is."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.broadcast_object_list([None], 0)
        return y + 1

    with emulated(1, 4) as hook:
        assert step(torch.ones(2)).tolist() == [3, 3]
        assert "broadcast" in {c.op.spelling for c in hook.collectives}
    assert len(compiled) == 2
