"""HybridEP's buffer, as its own Python code uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prismscale.cost.exchange.token_layout import TokenLayout
from prismscale.devices.null.libraries.deep_ep import stand_in
from prismscale.devices.null.libraries.deep_ep.hybrid_config import Configurer
from prismscale.graph.node import CollectiveOp
from support.emulation import RecordingHook, emulated

BF16 = torch.bfloat16
RANK, PER_NODE = 3, 8
TOKENS, HIDDEN, TOPK, EXPERTS = 1024, 256, 4, 32
hybrid: Any = stand_in().modules["hybrid_ep_cpp"]()


@pytest.fixture(params=[8, 16])
def hook(
    request: pytest.FixtureRequest, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RecordingHook]:
    """Of a world of one node or two, which is the group."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(PER_NODE))
    with emulated(RANK, request.param, "nccl") as hook:
        yield hook


class Job:
    """A buffer and what its calls are given."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.ranks = dist.get_world_size()
        near = hybrid.ExtendedMemoryAllocator().detect_accessible_ranks(self.group)
        self.configurer = Configurer(
            HIDDEN, TOKENS, EXPERTS // self.ranks, near, self.ranks // near, num_sms_combine_api=8
        )
        self.buffer = hybrid.HybridEPBuffer(
            self.group, self.configurer.buffer_config, RANK, 0, self.ranks, "", False, True, False
        )
        even = (TOKENS * TOPK // EXPERTS,) * EXPERTS
        self.layout = TokenLayout(
            tokens=TOKENS, topk=TOPK, counts=even, ranks=self.ranks, rank=RANK
        )

    def prepared(self, **more: Any) -> Any:
        """The handle of a dispatch."""
        index = torch.zeros(TOKENS, TOPK, dtype=torch.int64, device="cuda")
        routes = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device="cuda").scatter(1, index, 1)
        return self.buffer.metadata_preprocessing(
            config=self.configurer.get_default_config(),
            routing_map=routes.bool(),
            num_of_tokens_per_rank=TOKENS,
            **more,
        )

    @staticmethod
    def tokens() -> dict[str, torch.Tensor]:
        """What every rank sends."""
        return {
            "hidden": torch.empty(TOKENS, HIDDEN, dtype=BF16, device="cuda"),
            "probs": torch.empty(TOKENS, EXPERTS, device="cuda"),
        }


def exchanged(hook: RecordingHook) -> list[int]:
    """Bytes of the exchanges of tokens."""
    return [c.n_bytes for c in hook.collectives if c.op is CollectiveOp.ALL_TO_ALL]


@pytest.mark.parametrize("fused", [False, True])
def test_tokens_come_in_the_order_of_their_experts_and_go_back(
    hook: RecordingHook, fused: bool
) -> None:
    """Each crosses once to a rank or, between nodes, once to a node; weights go with them."""
    job = Job()
    handle = job.prepared(enable_permute=True, pad_multiple=16)
    got, weights, scales = job.buffer.dispatch_with_permute(
        handle=handle, with_probs=True, fuse_permute_dispatch=fused, **job.tokens()
    )
    assert handle.padded_tokens_per_expert.tolist() == job.layout.received_by_expert(16)
    assert got.shape == (sum(job.layout.received_by_expert(16)), HIDDEN)
    assert weights.shape == got.shape[:1]
    assert scales is None
    back, none = job.buffer.combine_with_unpermute(hidden=got, handle=handle)
    assert back.shape == (TOKENS, HIDDEN)
    assert none is None
    sent, returned = exchanged(hook)
    assert returned == job.layout.exchanged * HIDDEN * 2
    assert sent == returned + job.layout.exchanged * EXPERTS // (job.ranks // PER_NODE) * 4


def test_tokens_come_once_where_nothing_is_permuted(hook: RecordingHook) -> None:
    """And weights come back for all experts."""
    job = Job()
    handle = job.prepared()
    got, weights, _ = job.buffer.dispatch(handle=handle, with_probs=True, **job.tokens())
    assert got.shape == (job.layout.received, HIDDEN)
    assert handle.num_dispatched_tokens_tensor.item() == job.layout.received
    back, returned = job.buffer.combine(hidden=got, probs=weights, handle=handle, with_probs=True)
    assert back.shape == (TOKENS, HIDDEN)
    assert returned.shape == (TOKENS, EXPERTS)


def test_counts_stay_on_the_device_where_a_program_does_not_wait(hook: RecordingHook) -> None:
    """It says how many rows there are at most."""
    job = Job()
    handle = job.prepared(enable_permute=True, non_blocking=True, num_permuted_tokens=4096)
    assert handle.padded_tokens_per_expert.is_cuda
    got, _, _ = job.buffer.dispatch_with_permute(handle=handle, **job.tokens())
    assert got.shape == (4096, HIDDEN)


@pytest.mark.parametrize(("room", "overflows"), [(16 * 1024, 0), (16, 1)])
def test_what_the_device_counts_is_known(hook: RecordingHook, room: int, overflows: int) -> None:
    """A program that finds its room too small repeats the step without a limit."""
    job = Job()
    handle = job.prepared(
        enable_permute=True, non_blocking=True, num_permuted_tokens=room, pad_multiple=16
    )
    assert handle.tokens_per_expert.tolist() == job.layout.received_by_expert(1)
    assert handle.padded_tokens_per_expert.sum().item() == sum(job.layout.received_by_expert(16))
    assert (handle.overflow_flag != 0).item() == bool(overflows)


def test_buffers_hold_every_token_of_every_rank(hook: RecordingHook, held: list[int]) -> None:
    """Outside torch's allocator; more tokens take new ones."""
    before, allocated = len(held), torch.cuda.memory_allocated()
    job = Job()
    n_bytes = job.configurer.buffer_config.buffer_bytes(shared=True)
    most, near = TOKENS * job.ranks, EXPERTS * PER_NODE // job.ranks
    assert n_bytes >= most * (HIDDEN * 2 + near * 4 + EXPERTS)
    assert sum(held[before:]) == pytest.approx(n_bytes, abs=3 << 20)
    assert torch.cuda.memory_allocated() == allocated
    config = job.configurer.get_default_config()
    assert not job.buffer.update_buffer(config)
    config.max_num_of_tokens_per_rank *= 2
    assert job.buffer.update_buffer(config)
    assert sum(held[before:]) > 1.9 * n_bytes


def test_a_width_that_no_kernel_moves_is_refused(hook: RecordingHook) -> None:
    """As the library refuses it."""
    with pytest.raises(RuntimeError, match="not valid"):
        Configurer(HIDDEN + 8, TOKENS, 4, 8, 1)
