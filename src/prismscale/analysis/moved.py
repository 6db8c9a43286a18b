"""What a live rank really sent and received."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Sums over the real transfers of a rank; all 0 where there were none."""

    communications: int = 0
    defined: int = 0
    """Communications whose values were all real: from live members, or recorded."""
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    busy_ns: int = 0
    """Time from first to last message, summed over communications."""

    def plus(self, other: Moved) -> Moved:
        """Return the sum of both."""
        return Moved(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )
