"""The execution graph of the whole job: rank classes, group families, and how they map.

The cost of a job grows with its classes, not with its ranks: 8,192 ranks cost what their classes
cost. A :class:`RankClass` is a set of ranks that run the same trace in lockstep. A
:class:`GroupFamily` is a set of process groups whose positions are filled by the same classes, so
one vector operation serves all of them at once.

Array axes: ``M`` members of a class, ``G`` groups of a family, ``K`` positions in a group (group
rank).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.trace import RankTrace


@dataclass(frozen=True, kw_only=True)
class GroupFamily:
    """Process groups of one size with the same classes in the same positions."""

    index: int
    name: str
    ranks_KG: NDArray[np.int64]
    """Global rank of each member, by group rank ``K`` and group ``G``."""

    @property
    def group_size(self) -> int:
        """Number of ranks in each group."""
        return int(self.ranks_KG.shape[0])

    @property
    def n_groups(self) -> int:
        """Number of groups in the family."""
        return int(self.ranks_KG.shape[1])


@dataclass(frozen=True, kw_only=True)
class GroupSlot:
    """Places of the members of a class in the family that belongs to one of their group indices."""

    family: int
    slot_M: NDArray[np.int64]
    """Each member's flat index into the family's ``[K, G]`` table: ``group_rank * G + group``."""
    group_M: NDArray[np.int64]
    """Each member's group, as an index along axis ``G``."""
    group_rank: int
    """Group rank that all members have, or -1 if they differ."""


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks that run one trace in lockstep."""

    index: int
    trace: RankTrace
    members_M: NDArray[np.int64]
    """Global ranks, ascending."""
    slots: tuple[GroupSlot, ...]
    """One slot for each group index of :attr:`trace`."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members_M)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which members of a class were checked by capture, and how many were assumed."""

    class_index: int
    captured: tuple[int, ...]
    """Ranks of this class that were captured and found to run the same program."""
    assumed: int
    """Number of ranks in the class that were not captured."""


@dataclass(frozen=True, kw_only=True)
class JobGraph:
    """The execution graph of every rank. It stores durations, never start times."""

    world_size: int
    classes: tuple[RankClass, ...]
    families: tuple[GroupFamily, ...]
    coverage: tuple[Coverage, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)

    @cached_property
    def class_of_R(self) -> NDArray[np.int64]:
        """Class index of every rank."""
        out = np.full(self.world_size, -1, dtype=np.int64)
        for rank_class in self.classes:
            out[rank_class.members_M] = rank_class.index
        return out

    @cached_property
    def member_of_R(self) -> NDArray[np.int64]:
        """Index of every rank within its class."""
        out = np.full(self.world_size, -1, dtype=np.int64)
        for rank_class in self.classes:
            out[rank_class.members_M] = np.arange(rank_class.size)
        return out

    @property
    def n_rank_nodes(self) -> int:
        """Number of nodes in one steady step of all ranks: the size of a graph without classes."""
        return sum(c.trace.n_body * c.size for c in self.classes)
