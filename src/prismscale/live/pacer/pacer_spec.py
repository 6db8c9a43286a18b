"""What a pacer's process is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PacerSpec:
    """One live rank's pacer. Descriptors are passed on to it."""

    words: str
    """File of the words that it shares with the rank and its GPU."""
    link: int
    """Descriptor of the socket to the rank."""
    wire: int
    """Descriptor of the socket to the coordinator."""
    origin_ns: int
    """Of logical time, on the monotonic clock."""
    compute_factor: float
    """How much longer the rank computes than it does here."""
