"""Configuration of HybridEP, and the sizes of its buffers.

Source: csrc/hybrid_ep/config.cuh, buffer/intranode.cu, buffer/internode_doca.cu and
extension/allgather.cu of DeepEP's branch hybrid-ep (July 2026).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

_LEAST_TOKENS = 512
_CHUNK = 64


class TokenType(IntEnum):
    """Element type of the tokens that are sent."""

    UINT16 = 0
    UINT8 = 1


class ExtendedMemoryAllocator:
    """Allocator of memory that other ranks map."""

    def detect_accessible_ranks(self, process_group: Any) -> int:
        """Return the number of ranks of the group on this rank's node, including itself."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        ranks = torch.distributed.get_process_group_ranks(process_group)
        own = torch.distributed.get_rank() // per_node
        return sum(rank // per_node == own for rank in ranks)


@dataclass(kw_only=True)
class HybridEpConfigInstance:
    """Configuration of one call; programs may set further fields, which tune kernels."""

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    num_of_ranks_per_node: int = 1
    num_of_nodes: int = 1
    pad_multiple: int = 1
    num_of_tokens_per_chunk_preprocessing_api: int = _CHUNK
    num_of_tokens_per_chunk_dispatch_api: int = _CHUNK
    num_of_tokens_per_chunk_combine_api: int = _CHUNK
    token_data_type: TokenType = TokenType.UINT16

    @property
    def experts_of_node(self) -> int:
        """Number of experts of all ranks of an NVLink domain."""
        return self.num_of_experts_per_rank * self.num_of_ranks_per_node

    @property
    def is_fp8(self) -> bool:
        """Whether tokens are sent in 8 bits, with scales."""
        return self.token_data_type == TokenType.UINT8

    def is_valid(self, fuse_permute_dispatch: bool = False) -> bool:
        """Return whether kernels exist for it: TMA must be able to move its extents."""
        return self.hidden_dim % (512 if self.is_fp8 else 16) == 0 and not self.experts_of_node % 4


@dataclass(kw_only=True)
class BufferConfig(HybridEpConfigInstance):
    """Configuration of the buffers: the largest values of all calls."""

    def grow(self, asked: HybridEpConfigInstance) -> bool:
        """Take over the values that are larger in ``asked``; return whether there were any."""
        grew = False
        for name in (
            "max_num_of_tokens_per_rank",
            "hidden_dim",
            "num_of_experts_per_rank",
            "num_of_ranks_per_node",
            "num_of_nodes",
        ):
            if getattr(asked, name) > getattr(self, name):
                setattr(self, name, getattr(asked, name))
                grew = True
        return grew

    def buffer_bytes(self, *, shared: bool) -> int:
        """Return the bytes of all buffers, without the words by which ranks signal each other.

        With ``shared``, dispatch and combine have one buffer for tokens.
        """
        width, experts, others = self.hidden_dim, self.experts_of_node, self.num_of_nodes - 1
        own = self.max_num_of_tokens_per_rank
        most = own * self.num_of_ranks_per_node * self.num_of_nodes
        sent = 1 if self.is_fp8 else 2
        scales = width // 128 * 4
        n_bytes = most * (width * 2 + experts * 4 + scales)
        if not shared:
            n_bytes += most * (width * sent + experts * 4)
        # The routing of all ranks.
        n_bytes += most * experts * self.num_of_nodes
        if others:
            n_bytes += own * (width * sent + experts * self.num_of_nodes * 4 + scales)
            n_bytes += own * others * (width * sent + experts * 4 + scales)
            n_bytes += 2 * own * others * (width * 2 + experts * 4)
        return n_bytes


@dataclass(kw_only=True)
class HandleImpl:
    """Record of where tokens go, which is kept from a dispatch for its combine."""

    sparse_to_dense_map: Any = None
    rdma_to_attn_map: Any = None
    attn_to_rdma_map: Any = None
    num_dispatched_tokens_tensor: Any = None
    local_expert_routing_map: Any = None
    num_of_tokens_per_rank: int = 0
    config: HybridEpConfigInstance = field(default_factory=HybridEpConfigInstance)
    tokens_per_expert: Any = None
    padded_tokens_per_expert: Any = None
    overflow_flag: Any = None
    num_permuted_tokens: int | None = None
    dense_chunk_layout: Any = None
    dense_to_expert_map: Any = None

    def device_tensors(self) -> list[torch.Tensor]:
        """Return the tensors on the device, which one kernel fills."""
        found = vars(self).values()
        return [value for value in found if isinstance(value, torch.Tensor) and value.is_cuda]


class Configurer:
    """Buffer sizes of a job, and the default configuration of its calls."""

    def __init__(
        self,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        num_of_ranks_per_node: int,
        num_of_nodes: int,
        use_fp8: bool = False,
        **tuning: Any,
    ) -> None:
        """Set the sizes of the buffers; ``tuning`` sets the multiprocessors of kernels."""
        chunk = _chosen("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API")
        tokens = max(max_num_of_tokens_per_rank, _LEAST_TOKENS)
        self.buffer_config = BufferConfig(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=_padded(tokens, chunk),
            num_of_experts_per_rank=num_local_experts,
            num_of_ranks_per_node=num_of_ranks_per_node,
            num_of_nodes=num_of_nodes,
            num_of_tokens_per_chunk_dispatch_api=_chosen("NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API"),
            num_of_tokens_per_chunk_combine_api=chunk,
            token_data_type=TokenType.UINT8 if use_fp8 else TokenType.UINT16,
        )
        if not self.buffer_config.is_valid():
            raise RuntimeError("The buffer config is not valid.")

    def get_default_config(self, fuse_permute_dispatch: bool = False) -> HybridEpConfigInstance:
        """Return the configuration of a call with the sizes of the buffers."""
        return HybridEpConfigInstance(
            **{
                **vars(self.buffer_config),
                "num_of_tokens_per_chunk_preprocessing_api": _chosen(
                    "NUM_OF_TOKENS_PER_CHUNK_PREPROCESSING_API"
                ),
            }
        )

    def adjust_template(
        self, config: HybridEpConfigInstance, fuse_permute_dispatch: bool = False
    ) -> None:
        """Round the tokens of a rank in ``config`` up to a multiple of a chunk."""
        own = _padded(config.max_num_of_tokens_per_rank, config.num_of_tokens_per_chunk_combine_api)
        config.max_num_of_tokens_per_rank = own
        known = self.buffer_config
        known.max_num_of_tokens_per_rank = max(known.max_num_of_tokens_per_rank, own)


def _chosen(name: str) -> int:
    return int(os.environ.get(name, _CHUNK))


def _padded(tokens: int, chunk: int) -> int:
    return -(-tokens // chunk) * chunk
