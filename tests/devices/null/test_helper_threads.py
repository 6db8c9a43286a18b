"""Threads of a program beside the one that trains: what they exchange on the host is in no step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed as dist

from support.emulation import emulated

RANKS = 8


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, made by a helper thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def reduced(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Summed over all ranks, each of which has the same."""
    dist.all_reduce(tensor, group=group)
    return tensor


def test_metrics_that_a_helper_reduces_are_in_no_trace() -> None:
    """The helper has the sum; only what the program's thread exchanges is recorded."""
    with emulated(3, RANKS, backend="cpu:gloo,cuda:nccl") as hook:
        reduced(torch.ones(4, device="cuda"))
        seen = len(hook.collectives)
        assert float(in_a_thread(lambda: reduced(torch.ones(1)))) == RANKS
        assert len(hook.collectives) == seen
        reduced(torch.ones(1))
    assert len(hook.collectives) == seen + 1


def test_a_helpers_barrier_is_recorded_unless_its_group_is_the_hosts() -> None:
    """NCCL's barrier waits for the device."""
    with emulated(3, RANKS, backend="cpu:gloo,cuda:nccl") as hook:
        dist.barrier()
        on_host = dist.new_group(backend="gloo")
        seen = len(hook.collectives)
        in_a_thread(lambda: dist.barrier(on_host))
        assert len(hook.collectives) == seen
        in_a_thread(dist.barrier)
    assert len(hook.collectives) > seen


def test_what_a_helper_exchanges_on_the_gpu_is_recorded() -> None:
    """It is the job's, whichever thread asks for it."""
    with emulated(3, RANKS, backend="cpu:gloo,cuda:nccl") as hook:
        reduced(torch.ones(4, device="cuda"))
        in_a_thread(lambda: reduced(torch.ones(4, device="cuda")))
    assert [c.n_bytes for c in hook.collectives[-2:]] == [16, 16]


@pytest.mark.parametrize("tensors", ["cpu", "cuda"])
def test_a_program_may_train_in_a_thread_of_its_own(tensors: str) -> None:
    """The thread that communicates first is the program's."""
    with emulated(3, RANKS, backend="cpu:gloo,cuda:nccl") as hook:
        in_a_thread(lambda: reduced(torch.ones(4, device=tensors)))
    assert [c.n_bytes for c in hook.collectives] == [16]
