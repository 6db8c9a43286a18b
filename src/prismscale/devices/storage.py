"""Speed at which a rank writes a checkpoint, as an input: storage is not part of a program.

The default is an assumption, not a measurement: 2 GB/s per rank. That is about two thirds of each
rank's share when all eight ranks of a node use its 200 Gb/s storage network at once
(25 GB/s / 8 = 3.1 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.errors import UsageError

WRITE_BYTES_PER_S = 2e9
"""Speed that is assumed where the user gives none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Storage to which one rank writes its checkpoints.

    Raises :class:`UsageError` for a speed that is not positive.
    """

    write_bytes_per_s: float = WRITE_BYTES_PER_S

    def __post_init__(self) -> None:
        if not self.write_bytes_per_s > 0:
            raise UsageError(
                f"--storage: {self.write_bytes_per_s / 1e9:g} GB/s is not allowed; give a number "
                "above 0, as 2 for 2 GB/s"
            )

    def write_ns(self, n_bytes: int) -> int:
        """Return the nanoseconds that writing ``n_bytes`` takes."""
        return round(n_bytes / self.write_bytes_per_s * 1e9)
