"""Routers of experts on a device that computes: watched, and made to choose what the user says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from prismscale.analysis.overload import RouterUse
from prismscale.devices.cpu import CpuMemoryTracker
from prismscale.devices.router_watch import RouterWatch, choices
from prismscale.devices.routing import Routing

TOKENS, EXPERTS, K = 64, 8, 2
HEAVY = Routing(loads=((2.0, 1.0, 0.5, 0.5),), of_ranks=True)
"""Of 128 choices, 64, 32, 16 and 16 on four ranks of two experts each."""


def step(router: nn.Linear, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """A forward and backward pass through a router; the experts that it chose."""
    x = torch.ones(TOKENS, 4)
    scores = router(x).softmax(dim=-1)
    weights, experts = torch.topk(scores, K, dim=-1)
    (weights / weights.sum(dim=-1, keepdim=True)).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
    return experts


def counts(experts: torch.Tensor) -> list[int]:
    """Choices by expert."""
    return torch.bincount(experts.flatten(), minlength=EXPERTS).tolist()


def test_routers_choose_what_the_user_says() -> None:
    """Each token K experts, none twice, and gradients flow through the program's own weights."""
    watch, router = RouterWatch(HEAVY, "cpu"), nn.Linear(4, EXPERTS)
    with watch.watching():
        experts = step(router)
    assert counts(experts) == [32, 32, 16, 16, 8, 8, 8, 8]
    assert all(len(set(row)) == K for row in experts.tolist())
    assert torch.isfinite(router.weight.grad).all()  # type: ignore[arg-type]
    assert counts(step(router)) != counts(experts)


def test_without_a_word_of_the_user_nothing_is_touched() -> None:
    """Values, gradients and choices are those of the program."""
    router, twin = nn.Linear(4, EXPERTS), nn.Linear(4, EXPERTS)
    twin.load_state_dict(router.state_dict())
    with RouterWatch(Routing(), "cpu").watching():
        watched = step(router)
    assert torch.equal(watched, step(twin))
    assert torch.equal(router.weight.grad, twin.weight.grad)  # type: ignore[arg-type]


def test_other_choices_are_left_alone() -> None:
    """A sampler of a vocabulary, the smallest of a row, as many experts as nobody spoke of."""
    with RouterWatch(HEAVY, "cpu").watching():
        for shape, largest in (((4, 8192), True), ((4, EXPERTS), False), ((4, 6), True)):
            scores = torch.randn(shape)
            before = scores.clone()
            torch.topk(scores, 2, dim=-1, largest=largest)
            assert torch.equal(scores, before)


def test_the_programs_memory_is_as_without() -> None:
    """No block more in torch's allocator: what is written lies elsewhere."""

    def peak(routing: Routing) -> int:
        router = nn.Linear(4, EXPERTS)
        tracker = CpuMemoryTracker()
        with RouterWatch(routing, "cpu").watching():
            tracker.start()
            step(router)
            return tracker.stop().peak_bytes

    assert peak(HEAVY) == peak(Routing()) > 0


def test_the_next_step_has_its_own_loads_and_all_are_noted(tmp_path: Path) -> None:
    """By optimizer calls; what a backward pass came after is noted too."""
    routing = Routing(loads=((1.0,) * 8, (8.0, 1, 1, 1, 1, 1, 1, 2)))
    watch, router = RouterWatch(routing, "cpu"), nn.Linear(4, EXPERTS)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    with watch.watching():
        chosen = [counts(step(router, optimizer)) for _ in range(3)]
    assert chosen == [[16] * 8, [64, 8, 8, 8, 8, 8, 8, 16], [16] * 8]
    watch.save(tmp_path / "routers.json")
    use = RouterUse.load(tmp_path / "routers.json")
    assert [list(s.counts[0]) for s in use.steps] == chosen
    assert [s.backward_after for s in use.steps] == [(1,)] * 3
    (line,) = use.mocked
    assert line.times == 3
    assert Path(__file__).name in line.site


@given(st.lists(st.integers(0, 40), min_size=3, max_size=9), st.integers(1, 2), st.integers(0, 99))
def test_no_token_has_an_expert_twice(loads: list[int], k: int, seed: int) -> None:
    """Whatever the loads: what is more than there are tokens goes to others."""
    tokens = 16
    shares = np.array(loads, dtype=float) + 1e-3
    total = np.random.default_rng(seed).multinomial(tokens * k, shares / shares.sum())
    chosen = choices(total, tokens, k)
    assert all(len(set(row)) == k for row in chosen.tolist())
    found = np.bincount(chosen.reshape(-1), minlength=len(loads))
    assert found.sum() == tokens * k
    if total.max() <= tokens:
        assert found.tolist() == total.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_are_written_in_their_own_dtype(dtype: torch.dtype) -> None:
    """And add up to 1, as a softmax's do."""
    scores = torch.randn(TOKENS, EXPERTS).softmax(-1).to(dtype)
    with RouterWatch(HEAVY, "cpu").watching():
        torch.topk(scores, K)
    assert scores.sum(-1).float() == pytest.approx(np.ones(TOKENS), abs=0.02)
