"""Settings of live ranks' communication, from ``--transfers`` and ``--netns``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prismscale.errors import UsageError, did_you_mean

EMULATED = "emulated"
KINDS = (EMULATED, "real", "tree")
"""``emulated`` sends nothing. ``real`` sends bytes through gloo, with gloo's schedules. ``tree``
does the same, with all-reduces and reduce-scatters in trees."""
OTHERS = "others"
"""Name, in place of a rank, for the assistants that stand in for absent ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSettings:
    """Transfer settings of one job.

    Raises :class:`UsageError` for an unknown kind, or for namespaces without real transfers.
    """

    kind: str = EMULATED
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Network namespaces of live ranks and of :data:`OTHERS`; empty: all use loopback."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--transfers {self.kind!r}; {did_you_mean(self.kind, KINDS)}")
        if self.namespaces and not self.are_real:
            raise UsageError("--netns is of --transfers real: nothing else is sent over a network")

    @property
    def are_real(self) -> bool:
        """Whether bytes are sent."""
        return self.kind != EMULATED

    @property
    def have_links(self) -> bool:
        """Whether bytes go over links like the target's, so that transfer times count."""
        return bool(self.namespaces)

    @staticmethod
    def parse(kind: str, namespaces: Iterable[str], live: Iterable[int]) -> TransferSettings:
        """Parse the command line: ``RANK=NAME`` for each live rank, and ``others=NAME``.

        Raises:
            UsageError: a place is unknown, or a live rank or the assistants have no namespace.
        """
        found: dict[str, str] = {}
        places = {OTHERS, *map(str, live)}
        for text in namespaces:
            place, equals, name = text.partition("=")
            if not equals or not name or place not in places or "/" in name:
                allowed = ", ".join(sorted(places))
                raise UsageError(f"--netns {text!r}: give PLACE=NAME; places are {allowed}")
            found[place] = name
        missing = sorted(places - {*found})
        if found and missing:
            raise UsageError(f"--netns names no network namespace for {', '.join(missing)}")
        return TransferSettings(kind=kind, namespaces=found)
