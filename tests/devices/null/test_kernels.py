"""Kernels of a step: costed by a model, counted, and kept apart from the emulation's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from prismscale.cost.kernel import KernelCost
from prismscale.cost.nccl.nccl_memory import NcclSettings
from prismscale.devices.null.device import ModelledMemoryTracker, NullDevice
from prismscale.devices.null.kernel_ledger import KernelLedger
from prismscale.devices.null.memory.outside_memory import OutsideMemory
from prismscale.devices.null.runtime import active
from support.op_log import set_cost_model

MIB = 1 << 20


@dataclass(frozen=True)
class Flat:
    """Every call takes 7 µs on the device and 3 µs on the host."""

    def cost(self, signature: str) -> KernelCost:
        return KernelCost(
            device_ns=7000, host_ns=3000, source="modelled", error=0.2, kind="some kind"
        )


@pytest.fixture
def ledger() -> Iterator[KernelLedger]:
    yield KernelLedger(active(), Flat())
    set_cost_model(None)


def test_calls_of_the_last_step_are_counted(ledger: KernelLedger) -> None:
    """By distinct call, with the model's cost."""
    x = torch.empty(640, 64, device="cuda")
    x.add_(1)
    ledger.optimizer_ended()
    for _ in range(3):
        x.add_(1)
    ledger.optimizer_ended()
    (use,) = ledger.uses(ledger.n_steps - 1, ledger.n_steps)
    assert (use.calls, use.kind, use.device_ns, use.source) == (3, "some kind", 7000, "modelled")
    assert use.signature.startswith("aten::add")


def test_replays_of_a_graph_are_told_apart_from_the_hosts_own_launches(
    ledger: KernelLedger,
) -> None:
    """They take the device as long, and the host nothing."""
    x, graph = torch.empty(643, 64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    ledger.optimizer_ended()
    graph.replay()
    graph.replay()
    x.add_(1)
    ledger.optimizer_ended()

    uses = ledger.uses(ledger.n_steps - 1, ledger.n_steps)

    (added,) = (use for use in uses if use.signature.startswith("aten::add"))
    assert (added.calls, added.replayed) == (3, 2)
    assert (added.total_ns, added.launching_ns) == (21_000, 3_000)


def test_the_models_prices_pass_as_logical_time(ledger: KernelLedger) -> None:
    """On the stream and on the host."""
    x = torch.empty(641, 64, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(10):
        x.add_(1)
    ended.record()
    torch.cuda.synchronize()
    assert began.elapsed_time(ended) == pytest.approx(0.073)


def test_a_communications_fill_is_no_kernel_of_the_programs(ledger: KernelLedger) -> None:
    """What runs while the recorder works is neither counted nor timed."""
    x = torch.empty(642, 64, device="cuda")
    before = active().library.ps_host_time_ns()
    active().library.ps_without_cost(1)
    x.add_(1)
    active().library.ps_without_cost(0)
    ledger.optimizer_ended()
    assert ledger.uses(ledger.n_steps - 1, ledger.n_steps) == []
    assert active().library.ps_host_time_ns() == before


def test_tensors_in_flight_are_held_until_somebody_waits() -> None:
    """As NCCL's work objects hold theirs."""
    device, before = NullDevice(active()), torch.cuda.memory_allocated()
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    ended = device.communicate("channel", x.zero_, blocks_host=False)
    del x
    assert torch.cuda.memory_allocated() == before + MIB
    ended()
    assert torch.cuda.memory_allocated() == before


def test_peaks_are_those_of_each_step_whatever_the_program_resets() -> None:
    """``torch.cuda.reset_peak_memory_stats`` is the program's affair."""
    runtime, base = active(), torch.cuda.memory_allocated()
    outside = OutsideMemory(
        runtime.library,
        context_bytes=runtime.spec.context_bytes,
        settings=NcclSettings(channels=16, gpus_per_node=8),
    )
    tracker = ModelledMemoryTracker(runtime, outside)
    tracker.start()
    del (x := [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")])[0]
    torch.cuda.reset_peak_memory_stats()
    tracker.step_ended()
    x.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
    record = tracker.stop()
    assert [peak - base for peak in record.step_peak_bytes] == [8 * MIB, 2 * MIB]
    assert (record.source, record.peak_step) == ("modelled", 0)
