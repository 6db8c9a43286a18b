"""Plans which ranks to capture so that every rank's program is known, and verifies the plan.

The groups that rank 0 creates show the mesh: its *axes* are the groups that cut the world into
independent coordinates. On each axis the planner captures the first, second, middle and last
positions. It examines axes whose ranks should run the same program together: one rank is second on
all of these axes, one in the middle, one last, and a difference on any axis shows. If there is one,
it examines each axis alone. It always does so with axes along which ranks send to each other, as
pipeline stages do. Where two neighbours in the sample differ, it halves the interval between them
until the border is found. The borders of all axes are captured in full product. The opposite corner
of the world is a witness for all of it: if its program contradicts, the axes are examined again
from there. A quick plan examines axes without messages only in that case.

PrismLLM captures every rank, slice by slice, or one per data-parallel replica (section 4.2). It
assumes that replicas are the same; the planner checks this and reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product

import numpy as np
from numpy.typing import NDArray

from prismscale.capture.further_ranks import most_different
from prismscale.errors import UsageError
from prismscale.graph.likeness import program_fingerprint
from prismscale.graph.trace import RankTrace

Capture = Callable[[Sequence[int]], None]
"""Function that captures ranks, side by side, and adds their traces to the shared mapping."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One independent coordinate of the mesh."""

    name: str
    size: int
    position_R: NDArray[np.int64]
    """Position of every rank on the axis."""


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """The outcome: which rank represents which, and on what evidence."""

    representative_R: NDArray[np.int64]
    axes: tuple[Axis, ...]
    distinct: tuple[str, ...]
    """Names of axes along which programs differ."""
    witnesses: tuple[int, ...]
    """Captured ranks that were found equal to their representative."""
    checked: tuple[int, ...] = ()
    """Further ranks whose first steps were captured as a check."""

    @classmethod
    def of_all(cls, trace: RankTrace) -> CapturePlan:
        """Return the plan in which every rank was captured and represents itself.

        ``trace`` is that of rank 0.
        """
        axes = find_axes(trace)
        return cls(
            representative_R=np.arange(trace.world_size, dtype=np.int64),
            axes=axes,
            distinct=tuple(axis.name for axis in axes),
            witnesses=(),
        )


def find_axes(trace: RankTrace) -> tuple[Axis, ...]:
    """Return the axes of the mesh, read off the groups that rank 0 saw being created.

    A partition of the world into groups of equal size is an axis if rank 0's group and the ranks
    along the axes found so far have only rank 0 in common (a flattened ``dp × cp`` group adds
    nothing to ``dp`` and ``cp``). Ranks that no group separates form one more axis: plain data
    parallelism over the world.
    """
    world = trace.world_size
    # Small groups first, so that a flattened axis is refused in favour of the axes it consists of.
    partitions = sorted(_partitions(trace), key=lambda p: len(p[1][0]))
    axes: list[Axis] = []
    span = {0}
    for name, groups in partitions:
        own = next(g for g in groups if 0 in g)
        if span & set(own) != {0} or len(span) * len(own) > world:
            continue
        position = np.zeros(world, dtype=np.int64)
        for group in groups:
            position[list(group)] = np.arange(len(group))
        axes.append(Axis(name=name, size=len(own), position_R=position))
        span = _spanned(axes, world)
    residue = _residue(axes, world)
    return (*axes, residue) if residue.size > 1 else tuple(axes)


def axes_of_messages(trace: RankTrace, axes: Sequence[Axis]) -> list[int]:
    """Return the indices of ``axes`` along which rank 0, the rank of ``trace``, has messages."""
    messages = np.flatnonzero(trace.is_message_N)
    pairs = {(int(trace.group_index_N[i]), int(trace.peer_N[i])) for i in messages}
    peers = set()
    for group_index, offset in pairs:
        ranks = trace.groups[group_index].ranks
        peers.add(ranks[(ranks.index(0) + offset) % len(ranks)])
    return [a for a, axis in enumerate(axes) if any(axis.position_R[p] for p in peers)]


def rank_at(axes: Sequence[Axis], coordinates: tuple[int, ...]) -> int:
    """Return the first rank with these coordinates.

    Raises:
        UsageError: no rank has them, so the groups form no mesh.
    """
    here = np.ones(len(axes[0].position_R), dtype=bool)
    for axis, position in zip(axes, coordinates, strict=True):
        here &= axis.position_R == position
    found = np.flatnonzero(here)
    if len(found) == 0:
        raise UsageError(
            f"the process groups do not form a mesh: no rank has coordinates {coordinates} on "
            f"axes {[a.name for a in axes]}"
        )
    return int(found[0])


def _partitions(trace: RankTrace) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    by_kind: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for group in trace.known_groups:
        size = len(group.ranks)
        if 1 < size < trace.world_size:
            by_kind.setdefault((group.name, size), []).append(group.ranks)
    for (name, size), groups in by_kind.items():
        unique = list(dict.fromkeys(groups))
        for cut in _split_partitions(unique, trace.world_size // size):
            members = [r for g in cut for r in g]
            if len(members) == trace.world_size == len(set(members)):
                yield name or f"groups of {size}", cut


def _split_partitions(groups: list[tuple[int, ...]], count: int) -> Iterator[list[tuple[int, ...]]]:
    # Unnamed groups of one size may be several axes, created one after another.
    for start in range(0, len(groups) - count + 1, count):
        yield groups[start : start + count]


def _spanned(axes: Sequence[Axis], world: int) -> set[int]:
    """Return the ranks that differ from rank 0 only along ``axes``."""
    residue = _coset(axes, world)
    return set(np.flatnonzero(residue == residue[0]).tolist())


def _coset(axes: Sequence[Axis], world: int) -> NDArray[np.int64]:
    """Return for each rank how many lower ranks have the same coordinates on all ``axes``.

    Ranks with the same number differ only along the axes.
    """
    if not axes:
        return np.arange(world, dtype=np.int64)
    table = np.stack([a.position_R for a in axes])
    seen: dict[tuple[int, ...], int] = {}
    out = np.zeros(world, dtype=np.int64)
    for rank, key in enumerate(map(tuple, table.T.tolist())):
        out[rank] = seen.get(key, 0)
        seen[key] = out[rank] + 1
    return out


def _residue(axes: Sequence[Axis], world: int) -> Axis:
    position = _coset(axes, world)
    return Axis(name="replica", size=int(position.max()) + 1, position_R=position)


@dataclass(kw_only=True)
class CapturePlanner:
    """Captures ranks until every rank has a representative."""

    traces: Mapping[int, RankTrace]
    """Filled by :attr:`capture`."""
    capture: Capture
    world_size: int
    max_captures: int = 128
    also: tuple[int, ...] = ()
    """Ranks that are captured in any case."""
    quick: bool = False
    """Along axes without messages compare only the last rank with the first, unless it differs."""
    _axes: tuple[Axis, ...] = ()
    _borders: dict[int, set[int]] = field(default_factory=dict)
    """By axis: positions at which a new program begins (always includes 0)."""
    _programs: dict[int, str] = field(default_factory=dict)
    """By captured rank: fingerprint of its program."""

    def plan(self) -> CapturePlan:
        """Capture all ranks that are needed, and return the plan.

        Raises:
            UsageError: more captures would be needed than are allowed.
        """
        # On a mesh in rank order the last rank is the opposite corner, which is needed anyway.
        # Captured side by side with the first rank it costs no time.
        self._need([0, self.world_size - 1])
        self._axes = find_axes(self.traces[0])
        self._borders = {a: {0} for a in range(len(self._axes))}
        origin = tuple(0 for _ in self._axes)
        corner = tuple(a.size - 1 for a in self._axes)
        self._examine(origin)
        self._capture_product()
        for _ in range(4 if self.quick else 3):
            self._need([self._rank_at(corner)])
            if self._agrees(self._rank_at(corner)):
                break
            # Axes that a quick plan did not examine from the first rank may explain the last one.
            base, self.quick = (origin, False) if self.quick else (corner, False)
            self._examine(base)
            self._capture_product()
        self._need(self.also)
        return self._result()

    def check(self, more_time: Callable[[], bool], side_by_side: int) -> CapturePlan:
        """Capture further ranks, beginning with those that differ most from the captured ones.

        Args:
            more_time: asked before each round whether there is time for it.
            side_by_side: number of ranks in a round.
        """
        positions = [axis.position_R for axis in self._axes]
        further = most_different(positions, tuple(self.traces), self.world_size)
        checked: list[int] = []
        while more_time() and (ranks := list(islice(further, side_by_side))):
            self.capture(ranks)
            checked += ranks
        return replace(self._result(), checked=tuple(checked))

    def _need(self, ranks: Sequence[int]) -> None:
        missing = [r for r in dict.fromkeys(ranks) if r not in self.traces]
        if len(self.traces) + len(missing) > self.max_captures:
            raise UsageError(
                f"{len(self.traces) + len(missing)} ranks would have to be captured because their "
                f"programs differ, more than --max-captures {self.max_captures}; raise it, or "
                "look at the class table for the axis along which they differ"
            )
        if missing:
            self.capture(missing)

    def _examine(self, base: tuple[int, ...]) -> None:
        """Find the borders along every axis, with the other coordinates taken from ``base``."""
        samples = [sorted({0, 1, axis.size // 2, axis.size - 1}) for axis in self._axes]
        alone = axes_of_messages(self.traces[0], self._axes)
        together = [a for a in range(len(self._axes)) if a not in alone and not self.quick]
        diagonal = self._diagonal(base, together)
        self._need([*(self._along(base, a, p) for a in alone for p in samples[a]), *diagonal])
        if any(self._differ(diagonal[0], rank) for rank in diagonal):
            # The diagonal does not show along which axis they differ.
            alone = list(range(len(self._axes)))
            self._need([self._along(base, a, p) for a in alone for p in samples[a]])
        for a in alone:
            self._find_borders(base, a, samples[a])

    def _diagonal(self, base: tuple[int, ...], axes: Sequence[int]) -> list[int]:
        """Return ``base``, and the ranks that are first, second, middle, last on all ``axes``."""
        places = [(0, min(1, a.size - 1), a.size // 2, a.size - 1) for a in self._axes]
        ranks = [self._rank_at(base)]
        for k in range(4):
            place = [places[a][k] if a in axes else p for a, p in enumerate(base)]
            ranks.append(self._rank_at(tuple(place)))
        return list(dict.fromkeys(ranks))

    def _find_borders(self, base: tuple[int, ...], axis: int, positions: Sequence[int]) -> None:
        intervals = list(pairwise(positions))
        while intervals:
            middles = []
            following = []
            for p, q in intervals:
                if not self._differ(self._along(base, axis, p), self._along(base, axis, q)):
                    continue
                if q - p == 1:
                    self._borders[axis].add(q)
                else:
                    middle = (p + q) // 2
                    middles.append(self._along(base, axis, middle))
                    following += [(p, middle), (middle, q)]
            # All middles of a round are requested together, so that they run side by side.
            self._need(middles)
            intervals = following

    def _capture_product(self) -> None:
        corners = product(*(sorted(self._borders[a]) for a in range(len(self._axes))))
        self._need([self._rank_at(c) for c in corners])

    def _along(self, base: tuple[int, ...], axis: int, position: int) -> int:
        return self._rank_at((*base[:axis], position, *base[axis + 1 :]))

    def _rank_at(self, coordinates: tuple[int, ...]) -> int:
        return rank_at(self._axes, coordinates) if self._axes else 0

    def _differ(self, rank: int, other: int) -> bool:
        return self._program(rank) != self._program(other)

    def _program(self, rank: int) -> str:
        if rank not in self._programs:
            self._programs[rank] = program_fingerprint(self.traces[rank])
        return self._programs[rank]

    def _representatives(self) -> NDArray[np.int64]:
        snapped = [
            np.array(sorted(self._borders[a]))[
                # Finds the last border at or before each position.
                np.searchsorted(sorted(self._borders[a]), axis.position_R, side="right") - 1
            ]
            for a, axis in enumerate(self._axes)
        ]
        if not snapped:
            return np.zeros(self.world_size, dtype=np.int64)
        cells, inverse = np.unique(np.stack(snapped), axis=1, return_inverse=True)
        ranks = np.array([self._rank_at(tuple(c)) for c in cells.T.tolist()], dtype=np.int64)
        # The shape of the inverse differs between NumPy versions.
        return ranks[inverse.reshape(-1)]

    def _agrees(self, rank: int) -> bool:
        return not self._differ(rank, int(self._representatives()[rank]))

    def _result(self) -> CapturePlan:
        representative_R = self._representatives()
        for rank in self.traces:
            if self._differ(rank, int(representative_R[rank])):
                # A captured rank that fits no cell represents itself.
                representative_R[rank] = rank
        distinct = tuple(a.name for i, a in enumerate(self._axes) if len(self._borders[i]) > 1)
        witnesses = tuple(sorted(r for r in self.traces if representative_R[r] != r))
        return CapturePlan(
            representative_R=representative_R,
            axes=self._axes,
            distinct=distinct,
            witnesses=witnesses,
        )
