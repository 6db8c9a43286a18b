"""HybridEP's buffer: the allocations and exchanges of its methods.

Ranks of an NVLink domain write into each other's buffers. A token goes once to another domain,
through the rank at the same place there. Buffers are as large as if every token went everywhere,
and lie outside torch's allocator. If a program permutes tokens, they arrive in the order of their
experts. Source: csrc/hybrid_ep of DeepEP, branch hybrid-ep (July 2026).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from prismscale.cost.exchange.token_layout import TokenLayout
from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.deep_ep.buffer import integers
from prismscale.devices.null.libraries.deep_ep.hybrid_config import (
    BufferConfig,
    HandleImpl,
    HybridEpConfigInstance,
)
from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.torch_versions import renamed

_all_gather = renamed(dist, "all_gather_single", "all_gather_into_tensor")
_SPACE = "deep_ep::hybrid_"
_MAP_ROWS = 16
"""The number of rows of a map between nodes is a multiple of this."""


class HybridEPBuffer:
    """HybridEP's runtime on one rank of a group."""

    def __init__(
        self,
        process_group: Any,
        config: BufferConfig,
        local_rank: int,
        node_rank: int,
        group_size: int,
        base_path: str,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = True,
    ) -> None:
        """Allocate the buffers; with ``use_shared_buffer`` dispatch and combine take turns in one.

        ``base_path`` and ``load_cached_kernels`` concern kernels that are compiled at first use.
        """
        self._group = process_group
        self._config = config
        self._rank, self._size = node_rank * config.num_of_ranks_per_node + local_rank, group_size
        self._is_shared = use_shared_buffer
        self._gathers_itself = enable_custom_allgather
        self._held = self._allocated()

    def _allocated(self) -> Tensor:
        n_bytes = self._config.buffer_bytes(shared=self._is_shared)
        device = torch.device("cuda", torch.cuda.current_device())
        return _symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=device)

    def update_buffer(self, config: HybridEpConfigInstance) -> bool:
        """Make room for what ``config`` asks for; return whether the buffers had to grow."""
        grows = self._config.grow(config)
        if grows:
            del self._held
            self._held = self._allocated()
        return grows

    def metadata_preprocessing(
        self,
        *,
        config: HybridEpConfigInstance,
        routing_map: Tensor,
        num_of_tokens_per_rank: int,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        enable_permute: bool = False,
        fuse_permute_dispatch: bool = False,
        non_blocking: bool = False,
    ) -> HandleImpl:
        """Return a handle that says where each token goes, from the routing of all ranks.

        Unless ``non_blocking``, the host waits for counts.
        """
        everyone = self._gathered(routing_map)
        counts = _by_expert(routing_map, waits=not non_blocking)
        layout = TokenLayout(
            tokens=num_of_tokens_per_rank,
            topk=max(1, round(sum(counts) / max(1, num_of_tokens_per_rank))),
            counts=tuple(counts),
            ranks=self._size,
            rank=self._rank,
            peers=config.num_of_ranks_per_node,
        )
        handle = _maps(config, num_of_tokens_per_rank, layout, enable_permute, non_blocking)
        layout.keep_with(handle.sparse_to_dense_map)
        launch(f"{_SPACE}scan", memory("index"), reads=[everyone], writes=handle.device_tensors())
        if enable_permute:
            by_expert = layout.received_by_expert(max(1, pad_multiple or 0))
            room = sum(by_expert)
            if num_permuted_tokens is not None and num_permuted_tokens >= 0:
                room = num_permuted_tokens
            handle.num_permuted_tokens = room
            handle.padded_tokens_per_expert = _counts(by_expert, torch.int64, non_blocking)
            launch(
                f"{_SPACE}pad_tokens_per_expert",
                memory("pointwise"),
                reads=[handle.tokens_per_expert],
                writes=[handle.padded_tokens_per_expert],
            )
            # The program computes from these values on the device what it does next: if it finds
            # its room too small, it repeats the step.
            value_policy.state(handle.tokens_per_expert, layout.received_by_expert(1))
            value_policy.state(handle.overflow_flag, [int(sum(by_expert) > room)])
            if non_blocking:
                value_policy.state(handle.padded_tokens_per_expert, by_expert)
        return handle

    def _gathered(self, routing_map: Tensor) -> Tensor:
        """Return the routing of all ranks.

        Within a domain the library's own all_gather leaves its result in a buffer.
        """
        rows = routing_map.shape[0] * self._size
        if self._gathers_itself and self._config.num_of_nodes == 1:
            n_bytes = rows * routing_map.shape[1]
            self._group.exchange(routing_map, n_bytes, asynchronous=False)
            return self._held[:n_bytes]
        everyone = routing_map.new_empty((rows, routing_map.shape[1]))
        _all_gather(everyone, routing_map, group=self._group)
        return everyone

    def dispatch(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        handle: HandleImpl,
        with_probs: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the tokens that this rank receives, each once."""
        config, layout = handle.config, _layout_of(handle)
        self._send(hidden, probs if with_probs else None, scaling_factor, handle)
        got = hidden.new_empty((layout.received, hidden.shape[1]))
        weights = scales = None
        if with_probs:
            weights = _floats(layout.received, config.experts_of_node)
        if config.is_fp8:
            scales = _floats(layout.received, config.hidden_dim // 128)
        for made in (got, weights, scales):
            _copied(made)
        return got, weights, scales

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        handle: HandleImpl,
        pad_multiple: int | None = None,
        fuse_permute_dispatch: bool = False,
        non_blocking: bool = False,
        with_probs: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the tokens that this rank receives, grouped by expert."""
        rows = handle.num_permuted_tokens or 0
        got = hidden.new_empty((rows, hidden.shape[1]))
        weights = _floats(rows) if with_probs else None
        scales = _floats(rows, handle.config.hidden_dim // 128) if handle.config.is_fp8 else None
        self._send(hidden, probs if with_probs else None, scaling_factor, handle)
        if not fuse_permute_dispatch:
            # A kernel permutes tokens from the buffer, which holds each token once.
            reads = [got, weights, scales, handle.dense_to_expert_map]
            launch(f"{_SPACE}permute", memory("index"), reads=reads, writes=[got, weights, scales])
        return got, weights, scales

    def combine(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: HandleImpl, with_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of each token's copies, and their weights."""
        _copied(hidden)
        return self._returned(hidden, probs if with_probs else None, handle)

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: HandleImpl,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        with_probs: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`combine`, for tokens that lie in the order of their experts."""
        if not fuse_unpermute_combine:
            buffered = self._held[: _layout_of(handle).received * hidden.shape[1] * 2]
            reads = [hidden, probs, handle.dense_to_expert_map]
            launch(f"{_SPACE}unpermute", memory("index"), reads=reads, writes=[buffered])
        return self._returned(hidden, probs if with_probs else None, handle)

    def _send(
        self, hidden: Tensor, probs: Tensor | None, scales: Tensor | None, handle: HandleImpl
    ) -> None:
        if self._config.num_of_nodes > 1:
            for given in (hidden, probs, scales):
                _copied(given)
        row = hidden.shape[1] * hidden.element_size()
        row += 0 if probs is None else 4 * handle.config.experts_of_node
        row += 0 if scales is None else 4 * scales.shape[1]
        self._exchange(hidden, row, handle)

    def _returned(
        self, hidden: Tensor, probs: Tensor | None, handle: HandleImpl
    ) -> tuple[Tensor, Tensor | None]:
        config, count = handle.config, handle.num_of_tokens_per_rank
        out = hidden.new_empty((count, config.hidden_dim))
        weights = None
        row = config.hidden_dim * hidden.element_size()
        if probs is not None:
            weights = _floats(count, config.experts_of_node * config.num_of_nodes)
            row += 4 * config.experts_of_node
        self._exchange(hidden, row, handle)
        return out, weights

    def _exchange(self, x: Tensor, row_bytes: int, handle: HandleImpl) -> None:
        n_bytes = _layout_of(handle).exchanged * row_bytes
        self._group.exchange(x, n_bytes, asynchronous=False)


def _maps(
    config: HybridEpConfigInstance,
    tokens: int,
    layout: TokenLayout,
    permutes: bool,
    stays_on_device: bool,
) -> HandleImpl:
    """Return a handle with tensors of the shapes that the library gives them."""
    nodes = config.num_of_nodes
    everyone = tokens * config.num_of_ranks_per_node * nodes
    handle = HandleImpl()
    handle.config, handle.num_of_tokens_per_rank = config, tokens
    handle.sparse_to_dense_map = integers(tokens * nodes, config.num_of_ranks_per_node)
    handle.rdma_to_attn_map = _flags(-(-tokens // _MAP_ROWS) * _MAP_ROWS, nodes)
    handle.attn_to_rdma_map = _flags(tokens, nodes - 1)
    handle.num_dispatched_tokens_tensor = _counts([layout.received], torch.int32, stays_on_device)
    handle.local_expert_routing_map = _flags(everyone, config.num_of_experts_per_rank)
    handle.overflow_flag = integers(1)
    if permutes:
        chunk = config.num_of_tokens_per_chunk_preprocessing_api
        handle.dense_chunk_layout = integers(-(-tokens // chunk) * everyone // tokens)
        handle.dense_to_expert_map = integers(everyone, config.num_of_experts_per_rank)
        handle.tokens_per_expert = integers(config.num_of_experts_per_rank)
    return handle


def _by_expert(routing_map: Tensor, *, waits: bool) -> list[int]:
    """Return the number of this rank's tokens for each expert.

    Without ``waits``, known numbers are used, so that the host does not wait for the device.
    """
    counts = routing_map.sum(dim=0)
    known = None if waits else value_policy.known(counts)
    found: list[int] = (counts if known is None else known).tolist()
    return found


def _layout_of(handle: HandleImpl) -> TokenLayout:
    return TokenLayout.kept_with(handle.sparse_to_dense_map)


def _counts(values: list[int], dtype: torch.dtype, stays_on_device: bool) -> Tensor:
    """Return counts on the device, or on the host if the library writes them to pinned memory."""
    if stays_on_device:
        return torch.empty(len(values), dtype=dtype, device="cuda")
    return torch.tensor(values, dtype=dtype)


def _copied(tensor: Tensor | None) -> None:
    """Launch the copy of ``tensor`` into a buffer, or out of it."""
    if tensor is not None:
        launch(f"{_SPACE}copy", memory("copy"), reads=[tensor], writes=[tensor])


def _flags(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device="cuda")


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cuda")
