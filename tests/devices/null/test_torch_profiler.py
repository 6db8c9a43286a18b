"""The program's own torch.profiler, where no CUPTI is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from support.op_log import set_cost_model

DEVICE_US, HOST_NS = 250.0, 4_000
BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]


@pytest.fixture(autouse=True)
def costed() -> Iterator[None]:
    """Every kernel takes the same."""
    set_cost_model(lambda signature: (int(DEVICE_US * 1e3), HOST_NS))
    yield
    set_cost_model(None)


def device_us(seen: profile) -> dict[str, float]:
    """Device time of each operator, with those that it calls."""
    return {row.key: row.device_time_total for row in seen.key_averages()}


@pytest.mark.parametrize("activities", [BOTH, BOTH[1:]])
def test_operators_have_the_time_of_their_kernels(
    activities: list[ProfilerActivity], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also those that call others; and torch has nothing to complain about."""
    x = torch.randn(64, 64, device="cuda")
    with profile(activities=activities) as seen:
        torch.nn.functional.linear(x, x)
        x.relu()
        x.view(-1)
    times = device_us(seen)
    assert times["aten::linear"] == pytest.approx(DEVICE_US)
    assert times["aten::relu"] == pytest.approx(DEVICE_US)
    assert times["aten::view"] == 0
    assert "aten::empty" not in times, "shapes are inferred unseen"
    assert "CUDA" not in capfd.readouterr().err


def test_profiling_takes_no_time() -> None:
    """Events between operators are no work for the stream."""
    x = torch.randn(64, 64, device="cuda")

    def took_ms() -> float:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(8):
            x.relu()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    alone = took_ms()
    with profile(activities=BOTH):
        assert took_ms() == pytest.approx(alone)


def test_programs_see_that_cuda_can_be_profiled() -> None:
    """Some look before they ask for it."""
    assert ProfilerActivity.CUDA in supported_activities()  # type: ignore[no-untyped-call]
