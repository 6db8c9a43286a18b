"""DeepEP's buffer: the allocations, streams and exchanges of its methods.

Memory that it takes from CUDA itself (buffers that peers write into, 32 MiB of workspace) lies
outside torch's allocator. Source: csrc/deep_ep.cpp of DeepEP 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from prismscale.cost.exchange.token_layout import NVLINK_PEERS, TokenLayout
from prismscale.devices.null.libraries.deep_ep.buffer_sizes import Config
from prismscale.devices.null.libraries.launches import exchange, launch, memory

_SPACE = "deep_ep::"
_META_BYTES = 8
_WORKSPACE_BYTES = 32 << 20


class EventHandle:
    """Event after the work queued on a stream and, if given, after a communication."""

    def __init__(self, work: Any = None, stream: torch.Stream | None = None) -> None:
        """``stream`` is the current one if not given."""
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._work = work

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the communication and the event."""
        if self._work is not None:
            self._work.wait()
        torch.cuda.current_stream().wait_event(self._event)


class Buffer:
    """DeepEP's runtime on one rank of a group."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        low_latency_mode: bool,
        explicitly_destroy: bool,
        *_: Any,
    ) -> None:
        if low_latency_mode:
            raise NotImplementedError(
                "prismscale's stand-in for DeepEP has no low-latency mode, which is for inference"
            )
        self.group: Any = None
        """Process group; it is set when the library's own buffer has been made."""
        self._rank, self._ranks = rank, num_ranks
        self._stream = torch.cuda.Stream(priority=-1)
        self._is_available = False
        n_bytes = num_nvl_bytes + num_rdma_bytes + _WORKSPACE_BYTES
        device = torch.device("cuda", torch.cuda.current_device())
        self._held = _symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=device)

    # Place of this rank, and handles for its peers

    def get_local_device_id(self) -> int:
        return torch.cuda.current_device()

    def get_local_ipc_handle(self) -> bytearray:
        return bytearray(64)

    def get_local_nvshmem_unique_id(self) -> bytearray:
        return bytearray(128)

    def get_num_rdma_ranks(self) -> int:
        return max(1, self._ranks // NVLINK_PEERS)

    def get_rdma_rank(self) -> int:
        return self._rank // NVLINK_PEERS

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return self._rank % NVLINK_PEERS if is_global else 0

    def get_comm_stream(self) -> torch.Stream:
        return self._stream

    def sync(self, *_: Any) -> None:
        self._is_available = True

    def is_available(self) -> bool:
        return self._is_available

    def is_internode_available(self) -> bool:
        return self._is_available and self._ranks > NVLINK_PEERS

    def destroy(self) -> None:
        self._is_available = False

    # Layout, dispatch and combine

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventHandle | None,
        asynchronous: bool,
        on_comm_stream: bool,
    ) -> tuple[Any, ...]:
        """Return tokens by rank, node and expert, and whether each token goes to each rank."""
        with self._allocating(on_comm_stream):
            by_rank = integers(self._ranks)
            by_expert = integers(num_experts)
            goes = topk_idx.new_empty((topk_idx.shape[0], self._ranks), dtype=torch.bool)
            by_node = integers(self.get_num_rdma_ranks()) if self.is_internode_available() else None
            writes = [by_rank, by_expert, goes, by_node]
            launch(f"{_SPACE}get_dispatch_layout", memory("index"), reads=[topk_idx], writes=writes)
        event = self._end([topk_idx, *writes], None, asynchronous, on_comm_stream)
        return by_rank, by_node, by_expert, goes, event

    def intranode_dispatch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_tokens_per_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor | None,
        cached_num_recv_tokens: int,
        rank_prefix: Tensor | None,
        channel_prefix: Tensor | None,
        alignment: int,
        num_worst_tokens: int,
        config: Config,
        *rest: Any,
    ) -> tuple[Any, ...]:
        """Return received tokens, indices, weights and counts, and the handle's tensors.

        ``rest`` is the previous event, whether the call is asynchronous, and whether it allocates
        on the library's stream. In the branch ``hybrid-ep`` two arguments precede them: whether
        tokens are of 4 bits, and their scales, which come back after the scales of 8 bits.
        """
        *of_branch, _, asynchronous, on_comm_stream = rest
        with self._allocating(on_comm_stream):
            if rank_prefix is None or channel_prefix is None:
                rank_prefix = integers(self._ranks, self._ranks)
                channel_prefix = integers(self._ranks, config.channels)
                self._note_layout(rank_prefix, x, topk_idx, num_tokens_per_expert)
            layout = TokenLayout.kept_with(rank_prefix)
            count = num_worst_tokens or cached_num_recv_tokens or layout.received
            got = _received(count, x, x_scales, *of_branch[1:], topk_idx, topk_weights)
            _mark_local(got[-2], layout)
            kept = [integers(self._ranks, config.channels), integers(count)]
            heads = integers(x.shape[0], self._ranks)
        work = self._exchange("dispatch", config, x, x_scales, topk_idx, layout, asynchronous)
        given = [x, x_scales, topk_idx, topk_weights, is_token_in_rank]
        held = [*given, rank_prefix, channel_prefix, *got, *kept, heads]
        event = self._end(held, work, asynchronous, on_comm_stream)
        by_expert = [] if num_worst_tokens else layout.received_by_expert(alignment)
        made = (rank_prefix, channel_prefix, *kept, heads)
        return (*got, by_expert, *made, event)

    def intranode_combine(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        bias_0: Tensor | None,
        bias_1: Tensor | None,
        src_idx: Tensor,
        rank_prefix: Tensor,
        channel_prefix: Tensor,
        send_head: Tensor,
        config: Config,
        previous_event: EventHandle | None,
        asynchronous: bool,
        on_comm_stream: bool,
    ) -> tuple[Any, ...]:
        """Return the sum of each token's copies, and their weights."""
        layout = TokenLayout.kept_with(rank_prefix)
        held = [x, topk_weights, bias_0, bias_1, src_idx, rank_prefix, channel_prefix, send_head]
        count = send_head.shape[0]
        return self._combine(config, layout, held, count, asynchronous, on_comm_stream)

    def internode_dispatch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_tokens_per_rank: Tensor | None,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor | None,
        cached_num_recv_tokens: int,
        cached_num_rdma_recv_tokens: int,
        rdma_channel_prefix: Tensor | None,
        rdma_rank_prefix: Tensor | None,
        channel_prefix: Tensor | None,
        rank_prefix: Tensor | None,
        alignment: int,
        *tail: Any,
    ) -> tuple[Any, ...]:
        """As :meth:`intranode_dispatch`, but tokens enter each node through one of its ranks.

        ``tail`` is ``num_worst_tokens`` (since November 2025), configuration, previous event,
        whether the host goes on, and whether memory is of the communication stream.
        """
        *worst, config, _, asynchronous, on_comm_stream = tail
        num_worst_tokens = worst[0] if worst else 0
        nodes = self.get_num_rdma_ranks()
        with self._allocating(on_comm_stream):
            is_cached = rank_prefix is not None
            if rdma_channel_prefix is None or rdma_rank_prefix is None or channel_prefix is None:
                rdma_channel_prefix = integers(nodes, config.channels)
                rdma_rank_prefix = integers(nodes)
                channel_prefix = integers(self._ranks, config.channels)
            if rank_prefix is None:
                rank_prefix = integers(self._ranks)
                # The combine gets ``rdma_rank_prefix`` and not ``rank_prefix``.
                self._note_layout(rdma_rank_prefix, x, topk_idx, num_tokens_per_expert)
            layout = TokenLayout.kept_with(rdma_rank_prefix)
            count = num_worst_tokens or cached_num_recv_tokens or layout.received
            got = _received(count, x, x_scales, topk_idx, topk_weights)
            _mark_local(got[-2], layout)
            kept: list[Tensor | None] = [None] * 5
            if not is_cached:
                meta = x.new_empty((count, _META_BYTES), dtype=torch.uint8)
                first, second = integers(nodes, config.channels), integers(*channel_prefix.shape)
                heads = integers(x.shape[0], nodes)
                kept = [
                    first,
                    second,
                    meta,
                    heads,
                    integers(layout.received_by_node, NVLINK_PEERS),
                ]
        work = self._exchange("dispatch", config, x, x_scales, topk_idx, layout, asynchronous)
        prefixes = (rdma_channel_prefix, kept[0], rdma_rank_prefix, kept[1], rank_prefix)
        held = [x, x_scales, topk_idx, topk_weights, is_token_in_rank, channel_prefix, *got, *kept]
        event = self._end([*held, *prefixes], work, asynchronous, on_comm_stream)
        by_expert = [] if num_worst_tokens else layout.received_by_expert(alignment)
        matrices = (rdma_channel_prefix, channel_prefix, kept[0], rdma_rank_prefix)
        return (*got, by_expert, *matrices, kept[1], rank_prefix, *kept[2:], event)

    def internode_combine(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        bias_0: Tensor | None,
        bias_1: Tensor | None,
        src_meta: Tensor,
        is_combined_token_in_rank: Tensor,
        rdma_channel_prefix: Tensor,
        rdma_rank_prefix: Tensor,
        channel_prefix: Tensor,
        rdma_head: Tensor,
        nvl_head: Tensor,
        config: Config,
        previous_event: EventHandle | None,
        asynchronous: bool,
        on_comm_stream: bool,
    ) -> tuple[Any, ...]:
        """As :meth:`intranode_combine`, between nodes."""
        layout = TokenLayout.kept_with(rdma_rank_prefix)
        held = [x, topk_weights, bias_0, bias_1, src_meta, is_combined_token_in_rank]
        held += [rdma_channel_prefix, rdma_rank_prefix, channel_prefix, rdma_head, nvl_head]
        count = is_combined_token_in_rank.shape[0]
        return self._combine(config, layout, held, count, asynchronous, on_comm_stream)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"prismscale's stand-in for DeepEP has no Buffer.{name}; it has dispatch and combine "
            "of the normal mode"
        )

    def _note_layout(
        self, handle: Tensor, x: Tensor, topk_idx: Tensor | None, by_expert: Tensor | None
    ) -> None:
        """Count tokens, for which the program waits, and keep the layout with the handle."""
        assert topk_idx is not None
        assert by_expert is not None
        experts = by_expert.shape[0]
        counts = torch.bincount(topk_idx.reshape(-1), minlength=experts).tolist()
        layout = TokenLayout(
            tokens=x.shape[0],
            topk=topk_idx.shape[1],
            counts=tuple(counts[:experts]),
            ranks=self._ranks,
            rank=self._rank,
        )
        layout.keep_with(handle)

    def _combine(
        self,
        config: Config,
        layout: TokenLayout,
        held: Sequence[Tensor | None],
        count: int,
        asynchronous: bool,
        on_comm_stream: bool,
    ) -> tuple[Any, ...]:
        x, weights = held[:2]
        assert x is not None
        with self._allocating(on_comm_stream):
            kept = None if weights is None else weights.new_empty((count, weights.shape[1]))
            out = x.new_empty((count, x.shape[1]))
        work = self._exchange("combine", config, x, None, weights, layout, asynchronous)
        event = self._end([*held, kept, out], work, asynchronous, on_comm_stream)
        return out, kept, event

    def _exchange(
        self,
        kernel: str,
        config: Config,
        x: Tensor,
        scales: Tensor | None,
        routes: Tensor | None,
        layout: TokenLayout,
        asynchronous: bool,
    ) -> Any:
        """Communicate, while the kernel runs on the library's stream; both must end."""
        row = x.shape[1] * x.element_size()
        row += 0 if scales is None else scales.shape[1] * scales.element_size()
        row += 0 if routes is None else routes.shape[1] * (routes.element_size() + 4)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        cost = exchange(
            moved=layout.received,
            own=layout.tokens,
            row_bytes=row,
            multiprocessors=config.num_sms,
            combines=kernel == "combine",
        )
        with torch.cuda.stream(self._stream):
            launch(f"{_SPACE}{kernel}", cost, reads=[x])
        work = self.group.exchange(x, layout.exchanged * row, asynchronous=asynchronous)
        if not asynchronous:
            current.wait_stream(self._stream)
        return work

    @contextmanager
    def _allocating(self, on_comm_stream: bool) -> Iterator[None]:
        if not on_comm_stream:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def _end(
        self,
        tensors: Sequence[Tensor | None],
        work: Any,
        asynchronous: bool,
        on_comm_stream: bool,
    ) -> EventHandle | None:
        """Return the event to wait for, or None; the streams hold the tensors until the event."""
        if not asynchronous:
            return None
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)
                if on_comm_stream:
                    tensor.record_stream(torch.cuda.current_stream())
        return EventHandle(work, self._stream if work is not None else None)


def integers(*shape: int) -> Tensor:
    """Return an int32 tensor on the device for counts and places that a kernel writes."""
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def _received(count: int, *given: Tensor | None) -> list[Tensor | None]:
    """Return empty tensors of ``count`` rows, one for each given tensor; None stays None."""
    return [None if t is None else t.new_empty((count, *t.shape[1:])) for t in given]


def _mark_local(indices: Tensor | None, layout: TokenLayout) -> None:
    """State how many of the received indices are not -1: those of this rank's own experts."""
    if indices is not None and indices.numel():
        share = sum(layout.received_by_expert(1)) / indices.numel()
        torch.ops.prismscale_null.set_share(indices, min(1.0, share))
