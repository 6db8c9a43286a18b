"""What a device that is not there ran, and which values it made up: beside each trace, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from prismscale.errors import FormatError
from prismscale.files import write_json
from prismscale.toml_dataclass import decode


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """One distinct call in a steady step."""

    signature: str
    calls: int
    kind: str
    device_ns: int
    """Of one call."""
    host_ns: int
    source: str
    error: float = -1.0
    """Relative; negative where nobody knows."""

    @property
    def total_ns(self) -> int:
        """Device time of all calls."""
        return self.calls * self.device_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueUse:
    """A line of the program that was given a value which does not exist."""

    op: str
    call_site: str
    answer: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulated:
    """Of one captured rank."""

    kernels: tuple[KernelUse, ...] = ()
    """Of one steady step, longest in all first."""
    values: tuple[ValueUse, ...] = ()
    """From the program's start on, most frequent first."""

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> Emulated:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: not such a file.
        """
        try:
            table = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise FormatError(f"{path} does not describe an emulated device: {error}") from error
        return decode(Emulated, table, str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelKind:
    """Kernels of one kind and source in the steps of the captured ranks."""

    kind: str
    source: str
    calls: int
    device_ns: int
    error: float = -1.0
    """Relative, weighted by time; negative where nobody knows."""


def kernel_kinds(emulated: Iterable[Emulated]) -> tuple[KernelKind, ...]:
    """Totals over ranks, longest first."""
    uses: dict[tuple[str, str], list[KernelUse]] = {}
    for use in (use for rank in emulated for use in rank.kernels):
        uses.setdefault((use.kind, use.source), []).append(use)
    kinds = [
        KernelKind(
            kind=kind,
            source=source,
            calls=sum(u.calls for u in found),
            device_ns=sum(u.total_ns for u in found),
            error=kernel_error(found),
        )
        for (kind, source), found in uses.items()
    ]
    return tuple(sorted(kinds, key=lambda k: -k.device_ns))


def kernel_error(uses: Iterable[KernelUse]) -> float:
    """Error of a sum of kernels as if all erred alike; negative where most of it is unknown."""
    known = total = 0
    weighted = 0.0
    for use in uses:
        total += use.total_ns
        if use.error >= 0:
            known += use.total_ns
            weighted += use.total_ns * use.error
    return weighted / known if 2 * known > total else -1.0


def value_uses(emulated: Iterable[Emulated]) -> tuple[ValueUse, ...]:
    """Of all captured ranks, most frequent first."""
    counts: dict[ValueUse, int] = {}
    for use in (use for rank in emulated for use in rank.values):
        key = replace(use, count=0)
        counts[key] = counts.get(key, 0) + use.count
    uses = [replace(use, count=count) for use, count in counts.items()]
    return tuple(sorted(uses, key=lambda u: (-u.count, u.call_site)))
