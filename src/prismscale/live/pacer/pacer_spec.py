"""The specification of a pacer's process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PacerSpec:
    """The pacer of one live rank. Its process inherits the descriptors."""

    words: str
    """File of the words that the pacer shares with the rank and its GPU."""
    link: int
    """Descriptor of the socket to the rank."""
    wire: int
    """Descriptor of the socket to the coordinator."""
    origin_ns: int
    """Origin of logical time, on the monotonic clock."""
    compute_factor: float
    """Factor on the time that the rank's computation takes on this machine."""
