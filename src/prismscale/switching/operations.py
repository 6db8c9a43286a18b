"""Tracks which communications of a job are complete, and which ranks they still need.

A communication has the same name on every member (:mod:`prismscale.emulation.instance_ids`). A rank
*issues* its part, and may go on once all ranks whose part it needs have issued theirs. A rank that
only contributes is done when it has issued, as if every backend buffered the data: the root of a
broadcast or scatter, a sender, and the members of a reduce or gather except the root do not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prismscale.errors import MismatchError
from prismscale.graph.node import CollectiveOp

_FROM_ROOT = frozenset({CollectiveOp.BROADCAST, CollectiveOp.SCATTER})
_TO_ROOT = frozenset({CollectiveOp.REDUCE, CollectiveOp.GATHER})
_MESSAGES = frozenset({CollectiveOp.SEND, CollectiveOp.RECV})
REDUCED = frozenset({CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER})
"""Members need parts of one result, which the last member to issue computes for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedPart:
    """A rank's description of a communication, given when it issues its part."""

    name: str
    rank: int
    """Global rank."""
    op: CollectiveOp
    members: tuple[int, ...]
    """Global ranks in group order; for a message its sender and its receiver."""
    root: int = -1
    """Global rank of the root of a rooted collective; else -1."""
    n_bytes: int = 0
    reduction: str = ""
    group: str = ""
    """The program's name for the group."""
    site: str = ""
    """Call site in the program."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Ranks whose part this rank needs before it can go on."""
        if self.op in _FROM_ROOT:
            return (self.root,)
        if self.op in _TO_ROOT:
            return self.members if self.rank == self.root else ()
        if self.op is CollectiveOp.SEND:
            return ()
        return self.members[:1] if self.op is CollectiveOp.RECV else self.members

    @property
    def title(self) -> str:
        """The communication in words, for messages."""
        where = f" of group {self.group!r}" if self.group else ""
        return f"{self.op.spelling} of {self.n_bytes:,} bytes{where} at {self.site or 'unknown'}"

    def refuse_other(self, other: IssuedPart) -> None:
        """Raise :class:`MismatchError` if the two parts cannot belong to one communication."""
        if {self.op, other.op} <= _MESSAGES:
            same = self.n_bytes == other.n_bytes
        else:
            same = (self.op, self.root, self.reduction) == (other.op, other.root, other.reduction)
            same &= self.n_bytes == other.n_bytes or not self.op.bytes_must_agree
        if not same:
            raise MismatchError(
                f"ranks disagree about a communication: rank {other.rank} has {other.title} where "
                f"rank {self.rank} has {self.title}"
            )


@dataclass(kw_only=True, slots=True, eq=False)
class Operation:
    """A communication that some of its members have issued."""

    parts: dict[int, IssuedPart] = field(default_factory=dict)
    """Issued parts by rank, in order of issue."""
    is_reduced: bool = False
    """Whether the result of an operation in :data:`REDUCED` has been computed."""
    taken: set[int] = field(default_factory=set)
    """Ranks that have taken their outputs."""

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks that take part."""
        return next(iter(self.parts.values())).members


class OperationTable:
    """All communications that are in progress."""

    def __init__(self, world_size: int) -> None:
        self._open: dict[str, Operation] = {}
        self._pending = [0] * world_size

    def issue(self, part: IssuedPart) -> bool:
        """Add a part. Returns whether its rank, as the last to issue, must compute the result.

        Raises:
            MismatchError: the part does not fit those that others have issued.
        """
        operation = self._open.setdefault(part.name, Operation())
        parts = operation.parts
        if parts:
            part.refuse_other(next(iter(parts.values())))
            self._pending[part.rank] -= 1
        else:
            for member in part.members:
                self._pending[member] += member != part.rank
        parts[part.rank] = part
        return part.op in REDUCED and len(parts) == len(part.members)

    def reduced(self, name: str) -> None:
        """Note that the result of ``name`` has been computed."""
        self._open[name].is_reduced = True

    def missing(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks whose part of ``name`` ``rank`` needs and that have not issued it.

        If all have, and a result of :data:`REDUCED` is not there yet, this is the rank that
        computes it.
        """
        operation = self._open[name]
        part = operation.parts[rank]
        missing = tuple(r for r in part.needs if r not in operation.parts)
        if not missing and part.op in REDUCED and not operation.is_reduced:
            return (next(reversed(operation.parts)),)
        return missing

    def take(self, name: str, rank: int) -> bool:
        """Note that ``rank`` has its outputs. Returns whether all members have theirs."""
        operation = self._open[name]
        operation.taken.add(rank)
        if len(operation.taken) < len(operation.members):
            return False
        del self._open[name]
        return True

    def pending(self, rank: int) -> int:
        """Return how many communications that others have issued lack ``rank``'s part."""
        return self._pending[rank]

    def part(self, name: str, rank: int) -> IssuedPart:
        """Return the part of ``name`` that ``rank`` issued."""
        return self._open[name].parts[rank]

    def lacking(self, rank: int) -> Sequence[IssuedPart]:
        """Return one issued part for each communication that still lacks ``rank``'s part."""
        opened = (operation.parts for operation in self._open.values())
        firsts = ((parts, next(iter(parts.values()))) for parts in opened)
        return [p for parts, p in firsts if rank in p.members and rank not in parts]
