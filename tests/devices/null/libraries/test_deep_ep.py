"""DeepEP: its layout of tokens, and its own Python code over the stand-in."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from math import comb
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prismscale.cost.exchange.token_layout import TokenLayout
from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null.libraries.deep_ep.buffer import Buffer, integers
from prismscale.devices.null.libraries.deep_ep.buffer_sizes import Config
from prismscale.devices.null.runtime import active
from prismscale.emulation.hook import Collective
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.emulation.work import EmulatedWork
from prismscale.graph.node import CollectiveOp
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload

BF16 = torch.bfloat16
TOKENS, HIDDEN, TOPK, EXPERTS = 4096, 512, 4, 64
pytestmark = pytest.mark.filterwarnings("default")
needs_deep_ep = pytest.mark.skipif(
    importlib.util.find_spec("deep_ep") is None,
    reason="the Python code of DeepEP 1.2, from its repository",
)


class Communications:
    """A hook that keeps what was communicated."""

    def __init__(self) -> None:
        self.seen: list[Collective] = []
        self._payload = MirrorPayload()

    def communicate(self, batch: Sequence[Collective]) -> EmulatedWork:
        """Fill at once."""
        self.seen += batch
        for one in batch:
            self._payload.fill(one)
        return EmulatedWork([tensor for one in batch for tensor in one.outputs])

    def exchanged_bytes(self) -> list[int]:
        """Of each exchange of tokens."""
        return [c.n_bytes for c in self.seen if c.op is CollectiveOp.ALL_TO_ALL]


def _layout(ranks: int, rank: int = 0, counts: Sequence[int] = ()) -> TokenLayout:
    even = [TOKENS * TOPK // EXPERTS] * EXPERTS
    return TokenLayout(
        tokens=TOKENS, topk=TOPK, counts=tuple(counts or even), ranks=ranks, rank=rank
    )


def test_a_token_goes_to_a_rank_once() -> None:
    """Of four experts among 64, drawn without replacement, some lie on the same rank."""
    missed = comb(EXPERTS - 8, TOPK) / comb(EXPERTS, TOPK)
    assert _layout(8).to_rank == (round(TOKENS * (1 - missed)),) * 8
    assert _layout(8).received == 8 * _layout(8).to_rank[0] < TOKENS * TOPK


def test_one_expert_a_token_sends_each_token_once() -> None:
    """Nothing is duplicated."""
    layout = TokenLayout(tokens=TOKENS, topk=1, counts=(64,) * EXPERTS, ranks=8, rank=3)
    assert sum(layout.to_rank) == TOKENS
    assert layout.received == TOKENS


def test_a_rank_of_busy_experts_receives_more() -> None:
    """Its counts are those of the routing, padded to the alignment."""
    busy = [1000] * 8 + [(TOKENS * TOPK - 8000) // 56] * 56
    first, last = (_layout(8, rank, busy) for rank in (0, 7))
    assert first.received > last.received
    assert first.received_by_expert(128) == [8064] * 8


def test_the_network_carries_a_token_once_to_a_node() -> None:
    """With two nodes fewer tokens cross than ranks there get."""
    layout = _layout(16)
    across = layout.to_node[1]
    assert across < sum(layout.to_rank[8:])
    assert layout.exchanged == 2 * across


def test_hints_are_the_librarys() -> None:
    """Of csrc/config.hpp, for 8 ranks and rows of 14,336 bytes."""
    config = Config(20, 6, 256, 6, 128)
    slots = 10 * 8 * 256
    row = 14_336 + 8 + 128 * 12 + 128 * 4
    exact = 10 * 8 * 5 * 4 + slots * row
    assert config.get_nvl_buffer_size_hint(14_336, 8) == exact + 64, "a multiple of 128"
    assert config.get_rdma_buffer_size_hint(14_336, 8) == 0
    assert config.get_rdma_buffer_size_hint(14_336, 16) > 0


@pytest.fixture(scope="module")
def hook() -> Communications:
    """What was communicated in this file."""
    return Communications()


@pytest.fixture(scope="module", params=[8, 16])
def group(request: Any, hook: Communications, held: list[int]) -> Iterator[Any]:
    """The world, of one node or two."""
    environment = RankEnvironment(rank=1, world_size=request.param, local_world_size=8)
    with absent_peers(environment, hook):
        dist.init_process_group("nccl")
        yield dist.group.WORLD
        dist.destroy_process_group()


def _buffer(group: Any) -> Buffer:
    buffer = Buffer(1, group.size(), 1 << 20, 0, False, False)
    buffer.group = group
    return buffer


def _tokens(group: Any) -> tuple[Any, ...]:
    """Tokens, their experts and weights, and where they go, as a dispatch takes them."""
    x = torch.empty(TOKENS, HIDDEN, dtype=BF16, device="cuda")
    index = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK).indices
    goes = torch.ones(TOKENS, group.size(), dtype=torch.bool, device="cuda")
    return x, index, torch.empty(TOKENS, TOPK, device="cuda"), None, goes, integers(EXPERTS)


def _dispatch_ns(group: Any, multiprocessors: int) -> int:
    """Time of the dispatch's kernel on an H100."""
    x, *given = _tokens(group)
    config = Config(multiprocessors, 6, 256, 6, 128)
    _buffer(group).intranode_dispatch(
        x, None, *given, 0, None, None, 1, 0, config, None, False, False
    )
    library = active().library
    texts = [library.ps_signature(i).decode() for i in range(library.ps_signature_count())]
    stated = f",{multiprocessors},0;"
    (kernel,) = [t for t in texts if t.startswith("deep_ep::dispatch.exchange") and stated in t]
    return load_kernel_model("h100-sxm").cost(kernel).device_ns


@pytest.mark.parametrize("group", [8], indirect=True)
def test_a_dispatch_has_only_the_multiprocessors_that_the_program_gives_it(group: Any) -> None:
    """Half as many take about twice as long."""
    assert 1.5 < _dispatch_ns(group, 10) / _dispatch_ns(group, 20) <= 2


@pytest.mark.parametrize("group", [8], indirect=True)
def test_the_branch_of_hybrid_ep_has_scales_of_4_bits(group: Any) -> None:
    """They come back between the scales of 8 bits and the indices."""
    buffer, config = _buffer(group), Config(20, 6, 256, 6, 128)
    x, *given = _tokens(group)
    scales = torch.empty(TOKENS, HIDDEN // 16, dtype=torch.uint8, device="cuda")
    got, *results = buffer.intranode_dispatch(
        x, None, *given, 0, None, None, 1, 0, config, True, scales, None, False, False
    )
    wide, narrow, index, weights, by_expert, *_ = results
    assert wide is None
    assert narrow.shape == (len(got), HIDDEN // 16)
    assert index.shape == weights.shape == (len(got), TOPK)
    assert sum(by_expert) >= len(got)


@needs_deep_ep
@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_go_and_come_back(group: Any, hook: Communications, asynchronous: bool) -> None:
    """Dispatch and combine exchange as many bytes; shapes follow from the routing."""
    deep_ep = importlib.import_module("deep_ep")
    hook.seen.clear()
    buffer = deep_ep.Buffer(group, 1 << 20, 1 << 20 if group.size() > 8 else 0)
    x = torch.empty(TOKENS, HIDDEN, dtype=BF16, device="cuda")
    index = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK).indices
    weights = torch.empty(TOKENS, TOPK, device="cuda")
    events = {"async_finish": asynchronous}
    by_rank, by_node, by_expert, goes, _ = buffer.get_dispatch_layout(index, EXPERTS, **events)
    got, got_index, got_weights, counts, handle, event = buffer.dispatch(
        x,
        topk_idx=index,
        topk_weights=weights,
        num_tokens_per_rank=by_rank,
        num_tokens_per_rdma_rank=by_node,
        is_token_in_rank=goes,
        num_tokens_per_expert=by_expert,
        **events,
    )
    if asynchronous:
        event.current_stream_wait()
    layout = _layout(group.size(), rank=1)
    assert got.shape == (layout.received, HIDDEN)
    assert got_index.shape == got_weights.shape == (layout.received, TOPK)
    assert counts == layout.received_by_expert(1)
    back, _, event = buffer.combine(got, handle, **events)
    if asynchronous:
        event.current_stream_wait()
    assert back.shape == x.shape
    again, *_, event = buffer.dispatch(back, handle=handle, **events)
    assert again.shape == got.shape
    sent, returned, repeated = hook.exchanged_bytes()
    assert returned == repeated == layout.exchanged * HIDDEN * 2
    assert sent == returned + layout.exchanged * TOPK * (8 + 4)


@needs_deep_ep
def test_low_latency_is_refused(group: Any) -> None:
    """It is for inference."""
    deep_ep = importlib.import_module("deep_ep")
    with pytest.raises(NotImplementedError, match="low-latency"):
        deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=8)
