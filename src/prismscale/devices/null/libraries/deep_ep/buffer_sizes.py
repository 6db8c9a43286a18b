"""Sizes of DeepEP's buffers. Source: csrc/config.hpp of DeepEP 1.2."""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.cost.exchange.token_layout import NVLINK_PEERS

_TOP_K, _SCALES = 128, 128
"""Most experts and most scales of a token that the library's size hints assume."""
_META_BYTES, _INT4_BYTES = 8, 16
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Config:
    """Tuning parameters of a dispatch or a combine."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int

    @property
    def channels(self) -> int:
        """Number of channels, which are pairs of multiprocessors that send and receive."""
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes for communication within a node."""
        nodes, peers = max(num_ranks // NVLINK_PEERS, 1), min(num_ranks, NVLINK_PEERS)
        slots = self.channels * peers * self.num_max_nvl_chunked_recv_tokens
        return _aligned(self.channels * peers * (2 * nodes + 3) * 4 + slots * _row(hidden_bytes))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes for communication between nodes; 0 if there is only one node."""
        if num_ranks <= NVLINK_PEERS:
            return 0
        nodes = num_ranks // NVLINK_PEERS
        slots = self.channels * nodes * self._rdma_tokens
        flags = self.channels * nodes * (NVLINK_PEERS * 2 + 2) * 2 * 4
        return _aligned(flags + slots * 2 * (_row(hidden_bytes) + _INT4_BYTES))

    @property
    def _rdma_tokens(self) -> int:
        sent = self.num_max_rdma_chunked_send_tokens
        return -(-self.num_max_rdma_chunked_recv_tokens // sent) * sent


def _row(hidden_bytes: int) -> int:
    """Return the bytes of one token with its indices, weights and scales."""
    return hidden_bytes + _META_BYTES + _TOP_K * (8 + 4) + _SCALES * 4


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
