"""The last calls of ranks: one :class:`RankCalls` for each rank, with tables that all ranks share.

Array axis: ``N`` calls of a rank, in the order in which it made them. Ranks that did the same share
one :class:`CallColumns`, so thousands of ranks cost as much as a few.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Sizes = tuple[tuple[int, ...], ...]
NO_PEER = -1


class CallState(IntEnum):
    """How far a call had come. The numbers are ours; the file has the names in lower case."""

    SCHEDULED = 0
    """The program called it."""
    STARTED = 1
    """Its kernel runs, or waits for the other ranks."""
    COMPLETED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """A call apart from its caller: operation, sizes and element types."""

    op: str
    """As torch's recorder spells it, without the backend: ``all_reduce``, ``_all_gather_base``."""
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    dtypes: tuple[str, ...] = ()

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op in ("send", "recv")

    def sentence(self) -> str:
        """Return the operation and its input, for messages to the user."""
        shown = " + ".join("×".join(map(str, size)) or "1" for size in self.input_sizes[:2])
        return f"{self.op} of {shown} {self.dtypes[0] if self.dtypes else ''}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """A process group as a rank's record names it."""

    name: str
    """Unique within the rank."""
    description: str
    ranks: tuple[int, ...]
    """Global ranks in group order."""

    def label(self) -> str:
        """Return the group's description (or name) and size, for messages to the user."""
        return f"'{self.description or self.name}' of {len(self.ranks):,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallColumns:
    """Calls of one rank, or of several that did the same."""

    group_N: NDArray[np.int32]
    """Index into the rank's groups."""
    shape_N: NDArray[np.int32]
    """Index into :attr:`FlightRecord.shapes`."""
    peer_N: NDArray[np.int32]
    """For a send or receive, the peer's group rank minus ours, modulo the group's size; else
    :data:`NO_PEER`."""
    seq_N: NDArray[np.int64]
    """Sequence number among the group's collectives; of a send or receive, among its p2p calls."""
    state_N: NDArray[np.int8]
    """A :class:`CallState`."""
    site_N: NDArray[np.int32]
    """Index into :attr:`FlightRecord.sites`; -1 unknown."""

    @property
    def n_calls(self) -> int:
        """Number of calls."""
        return len(self.group_N)

    def last(self, most: int) -> CallColumns:
        """Return the last ``most`` calls only."""
        start = max(self.n_calls - most, 0)
        return CallColumns(**{f.name: getattr(self, f.name)[start:] for f in fields(self)})

    def digest(self) -> bytes:
        """Return a hash that is equal for equal columns."""
        found = hashlib.sha256()
        for field in fields(self):
            found.update(np.ascontiguousarray(getattr(self, field.name)).tobytes())
        return found.digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCalls:
    """The record of one rank."""

    rank: int
    groups: tuple[RecordedGroup, ...]
    columns: CallColumns
    is_whole: bool = True
    """Whether the record holds every call since the program's beginning."""


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """The records of a job."""

    shapes: tuple[CallShape, ...]
    sites: tuple[str, ...]
    ranks: Mapping[int, RankCalls]
    """By global rank; a rank that left no record is missing."""
    world_size: int

    def site(self, index: int) -> str:
        """Return ``file:line``, or a phrase if it is unknown."""
        return self.sites[index] if index >= 0 else "an unknown line"
