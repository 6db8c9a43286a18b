"""Routing maps: how many tokens an expert gets is the same whoever counts."""

from __future__ import annotations

import pytest
import torch

from prismscale.devices.null.runtime import active
from prismscale.devices.null.value_policy import ValuePolicy
from prismscale.devices.routing import Routing, spread

TOKENS, EXPERTS = 4096, 8


def routing_map(k: int = 2) -> torch.Tensor:
    """``k`` experts for each token, as megatron-core marks them."""
    logits = torch.randn(TOKENS, EXPERTS, device="cuda")
    _, indices = torch.topk(logits, k=k, dim=1)
    return torch.zeros_like(logits).int().scatter(1, indices, 1).bool()


def deterministic_map(k: int = 2) -> torch.Tensor:
    """The same, as megatron-core marks them where it asks for deterministic algorithms."""
    logits = torch.randn(TOKENS, EXPERTS, device="cuda")
    probs, indices = torch.topk(logits, k=k, dim=1)
    marks, rows = torch.zeros_like(logits), torch.arange(TOKENS, device="cuda").unsqueeze(1)
    marks.index_put_((rows, indices), torch.ones_like(probs), accumulate=False)
    return marks.bool()


def test_marks_that_are_put_by_index_count_as_those_that_are_scattered() -> None:
    """Also where the map was one of floats, whose elements read as any other float."""
    counts = deterministic_map(3).sum(dim=0).tolist()
    assert counts == routing_map(3).sum(dim=0).tolist()
    marks = torch.zeros(TOKENS, EXPERTS, device="cuda")
    columns = torch.zeros(TOKENS, 1, dtype=torch.int64, device="cuda")
    rows = torch.arange(TOKENS, device="cuda").unsqueeze(1)
    marks.index_put_((rows, columns), torch.ones(TOKENS, 1, device="cuda"))
    assert marks[0, 0].item() == 1.0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_token_is_routed_k_times(k: int) -> None:
    """The sum over the map, and over its columns, is tokens times k, evenly spread."""
    counts = routing_map(k).sum(dim=0).tolist()

    assert sum(counts) == TOKENS * k
    assert max(counts) - min(counts) <= 1


def test_selecting_by_the_map_agrees_with_its_counts() -> None:
    """masked_select returns as many tokens as the local experts' counts say."""
    local = routing_map()[:, 2:5].contiguous()
    counts = local.sum(dim=0).long().cpu()
    tokens = torch.arange(TOKENS, device="cuda").unsqueeze(0).expand(3, -1)
    chosen = tokens.masked_select(local.T.contiguous())

    assert chosen.shape == (int(counts.sum()),)
    assert len(torch.split(chosen, counts.tolist())) == 3


def test_counts_of_many_experts_on_many_ranks_stay_known() -> None:
    """256 experts over 64 ranks: each rank gathers what all of them send to its experts."""
    logits = torch.randn(TOKENS, 256, device="cuda")
    _, indices = torch.topk(logits, k=8, dim=1)
    counts = torch.zeros_like(logits).int().scatter(1, indices, 1).bool().sum(dim=0).long()
    gathered = torch.empty(64, 256, dtype=torch.int64, device="cuda")
    gathered.copy_(counts)  # as an all-gather fills it
    own = gathered.view(1, 64, 256).transpose(0, 1)[:, :, 4:8].contiguous()

    assert own.sum(dim=(0, 1)).tolist() == [64 * TOKENS * 8 // 256] * 4


def test_a_users_routing_spreads_the_counts() -> None:
    """Loads by expert come from the policy; the total stays."""
    ledger = active().ledger
    before = ledger.policy
    ledger.policy = ValuePolicy(routing=[5, 1, 1, 1, 0, 0, 0, 0])
    try:
        counts = routing_map().sum(dim=0).tolist()
    finally:
        ledger.policy = before

    assert counts == [5120, 1024, 1024, 1024, 0, 0, 0, 0]


def test_loads_of_ranks_are_shared_by_their_experts() -> None:
    """As on a device that computes: the same counts from the same loads."""
    ledger = active().ledger
    before = ledger.policy
    routing = Routing(loads=((1.5, 1.0, 0.8, 0.7),), of_ranks=True)
    ledger.policy = ValuePolicy(routing=routing.loads[0], routing_of_ranks=True)
    try:
        counts = routing_map().sum(dim=0).tolist()
    finally:
        ledger.policy = before

    shares = routing.shares_in(0, EXPERTS)
    assert shares is not None
    assert counts == spread(TOKENS * 2, shares).tolist()


def test_an_exponent_spreads_over_any_number_of_experts() -> None:
    """By the power of an expert's number; the total stays."""
    ledger = active().ledger
    before = ledger.policy
    ledger.policy = ValuePolicy(routing_exponent=1.0)
    try:
        counts = routing_map().sum(dim=0).tolist()
    finally:
        ledger.policy = before

    assert sum(counts) == TOKENS * 2
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.01)
    assert counts == sorted(counts, reverse=True)


def test_marks_are_forgotten_with_the_map() -> None:
    """A map that is overwritten no longer says how many marks it had."""
    marks = routing_map()
    marks.copy_(torch.randn(TOKENS, EXPERTS, device="cuda") > 0)

    assert marks.sum().item() != TOKENS * 2


def test_indices_of_absent_experts_are_left_out_by_every_count() -> None:
    """As megatron-core turns DeepEP's indices, of which a quarter are valid, into a map."""
    indices = torch.empty(TOKENS, EXPERTS, dtype=torch.int64, device="cuda")
    torch.ops.prismscale_null.set_share(indices, 0.25)
    mask = indices != -1
    rows = torch.arange(TOKENS, device="cuda").repeat_interleave(mask.sum(dim=1))
    marks = torch.zeros(TOKENS, 4, dtype=torch.long, device="cuda")
    marks[rows, indices[mask]] = 1

    assert rows.shape == indices[mask].shape == (TOKENS * EXPERTS // 4,)
    assert sum(marks.bool().sum(dim=0).tolist()) == len(rows)
    assert (indices >= 0).sum().item() == len(rows)
    assert (indices != 0).sum().item() != len(rows), "of zeros nothing is known"


def test_large_counts_of_marks_are_no_more_than_their_number() -> None:
    """Two marks a row on average: every row has some."""
    counts = routing_map(2).sum(dim=1)
    assert len(counts.nonzero()) == len(counts[counts >= 0]) == TOKENS
    assert len(torch.arange(TOKENS, device="cuda").repeat_interleave(counts)) == 2 * TOKENS
