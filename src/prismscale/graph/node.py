"""The vocabulary of graph nodes: the kinds of work, and the kinds of communication."""

from __future__ import annotations

from enum import IntEnum

MOST_TAGS = 4096
"""Number of message tags that are told apart: tags count modulo this number."""


class NodeKind(IntEnum):
    """The kind of a node. Every kind but COMPUTE synchronises with other ranks."""

    COMPUTE = 0
    COLLECTIVE = 1
    SEND = 2
    RECV = 3


class CollectiveOp(IntEnum):
    """A communication in torch spelling. Values are part of the file format: append only.

    ``n_bytes`` of a communication is always the larger of one member's input and output (the
    convention of nccl-tests): the whole tensor for ``all_reduce`` and ``broadcast``, the gathered
    output for ``all_gather``, the unscattered input for ``reduce_scatter``, and one member's whole
    input for ``all_to_all``.
    """

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    BARRIER = 8
    SEND = 9
    RECV = 10
    SYMM_MEM_BARRIER = 11
    """Barrier of ``torch.distributed._symmetric_memory``: ranks write words into each other's
    memory, without NCCL."""

    @property
    def spelling(self) -> str:
        """The name as ``torch.distributed`` spells it."""
        return self.name.lower()

    @property
    def is_p2p(self) -> bool:
        """True for ``send`` and ``recv``."""
        return self in (CollectiveOp.SEND, CollectiveOp.RECV)

    @property
    def bytes_must_agree(self) -> bool:
        """True if every member of the group must pass the same number of bytes."""
        return self in (
            CollectiveOp.ALL_REDUCE,
            CollectiveOp.REDUCE_SCATTER,
            CollectiveOp.ALL_GATHER,
            CollectiveOp.BROADCAST,
            CollectiveOp.REDUCE,
        )
