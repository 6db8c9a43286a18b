"""Where the values came from that absent peers contributed: beside each trace, as JSON."""

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
    """Where values come from, in the order in which sources are asked. ``--payload`` takes one of
    these: the first that is asked."""

    RULES = "rules"
    """What the user says."""
    RECORDED = "recorded"
    """What captured ranks sent."""
    MIRROR = "mirror"
    """What the rank itself does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadUse:
    """One source of values."""

    kind: PayloadKind
    name: str = ""
    """Of a rule."""
    where: str = ""
    """Where the rule is defined."""
    communications: int = 0
    """That it answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadUses:
    """All sources of one rank."""

    uses: tuple[PayloadUse, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        save_json(self, path)

    @staticmethod
    def load(path: Path) -> PayloadUses:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: not such a file.
        """
        return load_json(PayloadUses, path, "the payloads of a rank")


MIRRORED = (
    "With --payload mirror a rank hears itself where others would speak: where the program decides "
    "by what it hears (sizes, flags, votes, tokens by expert), it may decide otherwise than in the "
    "job."
)


@contextmanager
def mirror_blamed(kind: PayloadKind) -> Iterator[None]:
    """An error that ranks do not fit together says meanwhile that the mirror may be why.

    Raises:
        MismatchError, StuckError: the same ones.
    """
    try:
        yield
    except (MismatchError, StuckError) as error:
        if kind is not PayloadKind.MIRROR:
            raise
        raise type(error)(f"{error}\n{MIRRORED}") from error


def all_uses(ranks: Iterable[PayloadUses]) -> tuple[PayloadUse, ...]:
    """Of several ranks together, rules in their order."""
    counts: Counter[PayloadUse] = Counter()
    for use in (use for rank in ranks for use in rank.uses):
        counts[replace(use, communications=0)] += use.communications
    found = [replace(use, communications=n) for use, n in counts.items()]
    return tuple(use for kind in PayloadKind for use in found if use.kind is kind)


def refuse_idle_rules(uses: Iterable[PayloadUse]) -> None:
    """A rule that is for nothing is misspelt, or the program is another than its author thinks.

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
