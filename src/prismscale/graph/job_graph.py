"""The whole job's execution graph: rank classes, group families, and who maps to whom.

8,192 ranks cost what their classes cost. A :class:`RankClass` is a set of ranks that run the same
trace in lockstep; a :class:`GroupFamily` is a set of process groups that are populated by the same
classes in the same positions, so one vector operation answers all of them at once.

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
    """Global rank by group rank ``K`` and group ``G``."""

    @property
    def group_size(self) -> int:
        """Ranks in each group."""
        return int(self.ranks_KG.shape[0])

    @property
    def n_groups(self) -> int:
        """Groups in the family."""
        return int(self.ranks_KG.shape[1])


@dataclass(frozen=True, kw_only=True)
class GroupSlot:
    """Where the members of a class sit in the family that one of their group indices names."""

    family: int
    slot_M: NDArray[np.int64]
    """Each member's flat index into the family's ``[K, G]`` table: ``group_rank * G + group``."""
    group_M: NDArray[np.int64]
    """Each member's group, an index into ``G``."""
    group_rank: int
    """Group rank shared by all members, or -1 where members differ."""


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks that run one trace in lockstep."""

    index: int
    trace: RankTrace
    members_M: NDArray[np.int64]
    """Global ranks, ascending."""
    slots: tuple[GroupSlot, ...]
    """By group index of :attr:`trace`."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members_M)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What was assumed about a class, and what was checked."""

    class_index: int
    captured: tuple[int, ...]
    """Ranks of this class that were captured and found the same."""
    assumed: int
    """Ranks that share the class without having been captured."""


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
        """Nodes of one steady step over all ranks: what a flat graph would hold."""
        return sum(c.trace.n_body * c.size for c in self.classes)
