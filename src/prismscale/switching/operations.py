"""Which communications of a job are complete, and whom they still need.

A communication has one name on every member (:mod:`prismscale.emulation.instance_ids`). A rank
*issues* its part, and may go on once all whose part it needs have issued theirs. What a rank only
gives is done when it is issued, as if every backend had room for it: a root that broadcasts, a
sender, and the members of a reduce or gather but the root wait for nobody.
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
"""Each member needs a part of one result, which the last one that issues works out for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedPart:
    """What one rank says of a communication when it issues its part."""

    name: str
    rank: int
    """Global rank."""
    op: CollectiveOp
    members: tuple[int, ...]
    """Global ranks in group order; of a message its sender and its receiver."""
    root: int = -1
    """Global rank of the root, of a rooted collective."""
    n_bytes: int = 0
    reduction: str = ""
    group: str = ""
    """What the program calls the group."""
    site: str = ""
    """The program's line."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Ranks whose part this rank needs before it goes on."""
        if self.op in _FROM_ROOT:
            return (self.root,)
        if self.op in _TO_ROOT:
            return self.members if self.rank == self.root else ()
        if self.op is CollectiveOp.SEND:
            return ()
        return self.members[:1] if self.op is CollectiveOp.RECV else self.members

    @property
    def title(self) -> str:
        """The communication in a sentence."""
        where = f" of group {self.group!r}" if self.group else ""
        return f"{self.op.spelling} of {self.n_bytes:,} bytes{where} at {self.site or 'unknown'}"

    def refuse_other(self, other: IssuedPart) -> None:
        """Raise :class:`MismatchError` where the two cannot be of one communication."""
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
    """By rank, in the order of issue."""
    is_reduced: bool = False
    """Its result is there, where it is one of :data:`REDUCED`."""
    taken: set[int] = field(default_factory=set)
    """Ranks that have their outputs."""

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part."""
        return next(iter(self.parts.values())).members


class OperationTable:
    """All communications under way."""

    def __init__(self, world_size: int) -> None:
        self._open: dict[str, Operation] = {}
        self._pending = [0] * world_size

    def issue(self, part: IssuedPart) -> bool:
        """Add a part. Returns whether its rank is to work out the result, as the last to issue.

        Raises:
            MismatchError: it does not fit what others have issued.
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
        """The result of ``name`` has been worked out."""
        self._open[name].is_reduced = True

    def missing(self, name: str, rank: int) -> tuple[int, ...]:
        """Whose part ``rank`` needs of ``name`` and has not been issued; when there are none and
        the result is being worked out, the rank that does it."""
        operation = self._open[name]
        part = operation.parts[rank]
        missing = tuple(r for r in part.needs if r not in operation.parts)
        if not missing and part.op in REDUCED and not operation.is_reduced:
            return (next(reversed(operation.parts)),)
        return missing

    def take(self, name: str, rank: int) -> bool:
        """``rank`` has its outputs. Returns whether nobody needs what was stored any more."""
        operation = self._open[name]
        operation.taken.add(rank)
        if len(operation.taken) < len(operation.members):
            return False
        del self._open[name]
        return True

    def pending(self, rank: int) -> int:
        """How many communications that others have issued still lack ``rank``'s part."""
        return self._pending[rank]

    def part(self, name: str, rank: int) -> IssuedPart:
        """What ``rank`` said of ``name``."""
        return self._open[name].parts[rank]

    def lacking(self, rank: int) -> Sequence[IssuedPart]:
        """One part each of the communications that still lack ``rank``'s."""
        opened = (operation.parts for operation in self._open.values())
        firsts = ((parts, next(iter(parts.values()))) for parts in opened)
        return [p for parts, p in firsts if rank in p.members and rank not in parts]
