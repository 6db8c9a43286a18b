"""Records which sources gave the values that absent peers contribute; JSON beside each trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from prismscale.errors import MismatchError, StuckError, UsageError
from prismscale.typed_files import load_json, save_json


class PayloadKind(StrEnum):
    """Kinds of sources of values, in the order in which sources are asked.

    ``--payload`` names the first that is asked.
    """

    RULES = "rules"
    """Rules of the user."""
    RECORDED = "recorded"
    """Values that captured ranks sent."""
    MIRROR = "mirror"
    """The rank's own contribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadUse:
    """One source of values, and how many communications it answered."""

    kind: PayloadKind
    name: str = ""
    """Name of a rule."""
    where: str = ""
    """Where a rule is defined."""
    communications: int = 0
    """Number of communications that it answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadUses:
    """All sources that one rank used."""

    uses: tuple[PayloadUse, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @staticmethod
    def load(path: Path) -> PayloadUses:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: the file is damaged or of another kind.
        """
        return load_json(PayloadUses, path, "the payloads of a rank")


MIRRORED = (
    "With --payload mirror a rank hears itself where others would speak: where the program decides "
    "by what it hears (sizes, flags, votes, tokens by expert), it may decide otherwise than in the "
    "job."
)


@contextmanager
def mirror_blamed(kind: PayloadKind) -> Iterator[None]:
    """Add to errors about ranks that do not fit together that the mirror may be the reason.

    Raises:
        MismatchError, StuckError: those of the body, with :data:`MIRRORED` where it applies.
    """
    try:
        yield
    except (MismatchError, StuckError) as error:
        if kind is not PayloadKind.MIRROR:
            raise
        raise type(error)(f"{error}\n{MIRRORED}") from error


def all_uses(ranks: Iterable[PayloadUses]) -> tuple[PayloadUse, ...]:
    """Add up the uses of several ranks, in the order of :class:`PayloadKind`."""
    counts: Counter[PayloadUse] = Counter()
    for use in (use for rank in ranks for use in rank.uses):
        counts[replace(use, communications=0)] += use.communications
    found = [replace(use, communications=n) for use, n in counts.items()]
    return tuple(use for kind in PayloadKind for use in found if use.kind is kind)


def refuse_idle_rules(uses: Iterable[PayloadUse]) -> None:
    """Refuse unused rules: they are misspelt, or the program differs from what their author thinks.

    Raises:
        UsageError: some rules answered no communication of any captured rank.
    """
    ruled = [use for use in uses if use.kind is PayloadKind.RULES]
    idle = [f"'{use.name}' ({use.where})" for use in ruled if not use.communications]
    if idle:
        which = f"rule {idle[0]} matches" if len(idle) == 1 else f"rules {', '.join(idle)} match"
        raise UsageError(
            f"{which} no communication of the captured ranks: look at op, group, site, dtype and "
            "numel (the report and trace.perfetto-trace of a run without it name them), or take "
            "it out"
        )
