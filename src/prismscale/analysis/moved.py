"""What a live rank really sent and received."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Of real transfers; all 0 where there were none."""

    communications: int = 0
    defined: int = 0
    """Of these, with values that were all real: of live members, or recorded."""
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    busy_ns: int = 0
    """From the first to the last message of each, together."""

    def plus(self, other: Moved) -> Moved:
        """Both together."""
        return Moved(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )
