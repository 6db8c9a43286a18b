"""What a null device ran, which values it made up, and which checkpoints were written from it.

Each captured rank has one such JSON file beside its trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from prismscale.cost.kernel_signature import FIELD
from prismscale.files import write_json
from prismscale.typed_files import load_json


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """One distinct kernel call in a steady step."""

    signature: str
    calls: int
    kind: str
    device_ns: int
    """Device time of one call."""
    host_ns: int
    """Host time to launch one call."""
    source: str
    error: float = -1.0
    """Relative; negative where unknown."""
    replayed: int = 0
    """Calls that CUDA graphs make. They cost the host nothing."""

    @property
    def total_ns(self) -> int:
        """Device time of all calls."""
        return self.calls * self.device_ns

    @property
    def launching_ns(self) -> int:
        """Host time of all calls."""
        return (self.calls - self.replayed) * self.host_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueUse:
    """A program line that read a value which does not exist, and the answer that it was given."""

    op: str
    call_site: str
    answer: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerRegion:
    """A region that the program compiles and that the device ran operator by operator."""

    region: str
    reason: str
    count: int
    """How often it was compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointUse:
    """A rank's part of one checkpoint, as written to storage."""

    after_optimizer_calls: int
    """Number of optimizer calls before the save."""
    n_bytes: int
    is_async: bool
    """Whether the program ran on during the write."""
    write_ns: int
    """Duration of the write. The program waits for it unless the write is asynchronous."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryUse:
    """A library that exists only as a CUDA binary and that a stand-in replaced."""

    name: str
    version: str
    """Version of its Python code; empty where unknown."""
    namespace: str
    """Operator namespace of its kernels."""
    modules: tuple[str, ...]
    """Modules that the stand-in provides."""


Counted = TypeVar("Counted", ValueUse, EagerRegion)


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulated:
    """Record of the null device of one captured rank."""

    kernels: tuple[KernelUse, ...] = ()
    """Calls of one steady step, in descending order of total time."""
    values: tuple[ValueUse, ...] = ()
    """Reads from the start of the program on, most frequent first."""
    checkpoints: tuple[CheckpointUse, ...] = ()
    """In order of writing."""
    libraries: tuple[LibraryUse, ...] = ()
    """Libraries replaced by stand-ins, in order of import."""
    eager_regions: tuple[EagerRegion, ...] = ()
    """In order of compilation."""

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> Emulated:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: the file is damaged or of another kind.
        """
        return load_json(Emulated, path, "an emulated device")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelKind:
    """Kernels of one kind and source, in one step of every captured rank."""

    kind: str
    source: str
    calls: int
    device_ns: int
    error: float = -1.0
    """Relative, weighted by time; negative where unknown."""
    host_ns: int = 0
    """Host time to launch them."""


def kernel_kinds(emulated: Iterable[Emulated]) -> tuple[KernelKind, ...]:
    """Sum kernels over ranks by kind and source, longest first."""
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
            host_ns=sum(u.launching_ns for u in found),
        )
        for (kind, source), found in uses.items()
    ]
    return tuple(sorted(kinds, key=lambda k: -k.device_ns))


def largest_kernels(emulated: Iterable[Emulated], most: int = 12) -> tuple[KernelUse, ...]:
    """Return the distinct calls that take the most device time, over all captured ranks."""
    found: dict[str, KernelUse] = {}
    for use in (use for rank in emulated for use in rank.kernels):
        if before := found.get(use.signature):
            calls, replayed = before.calls + use.calls, before.replayed + use.replayed
            use = replace(use, calls=calls, replayed=replayed)
        found[use.signature] = use
    return tuple(sorted(found.values(), key=lambda use: -use.total_ns)[:most])


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownOperator:
    """An operator without a cost rule. Its calls are costed by the bytes that they touch."""

    op: str
    calls: int
    device_ns: int
    """Device time of all calls."""


def unknown_operators(emulated: Iterable[Emulated]) -> tuple[UnknownOperator, ...]:
    """Return operators without a cost rule, over all captured ranks, longest first."""
    found: dict[str, list[KernelUse]] = {}
    for use in (use for rank in emulated for use in rank.kernels):
        if use.source == "default":
            found.setdefault(operator_of(use.signature), []).append(use)
    operators = [
        UnknownOperator(
            op=op, calls=sum(u.calls for u in uses), device_ns=sum(u.total_ns for u in uses)
        )
        for op, uses in found.items()
    ]
    return tuple(sorted(operators, key=lambda o: -o.device_ns))


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInShare:
    """The part of the device's time that a library's stand-in accounts for."""

    name: str
    version: str
    modules: tuple[str, ...]
    calls: int
    """Calls of its kernels, in one step of every captured rank."""
    device_ns: int
    share: float
    """Fraction of device time, 0 … 1."""


def stand_in_shares(emulated: Iterable[Emulated]) -> tuple[StandInShare, ...]:
    """Return the share of each stand-in over all captured ranks, in order of import."""
    ranks = tuple(emulated)
    libraries = dict.fromkeys(library for rank in ranks for library in rank.libraries)
    uses = [use for rank in ranks for use in rank.kernels]
    total_ns = sum(use.total_ns for use in uses)
    return tuple(_stand_in_share(library, uses, total_ns) for library in libraries)


def _stand_in_share(library: LibraryUse, uses: list[KernelUse], total_ns: int) -> StandInShare:
    own = [use for use in uses if use.signature.startswith(f"{library.namespace}::")]
    device_ns = sum(use.total_ns for use in own)
    return StandInShare(
        name=library.name,
        version=library.version,
        modules=library.modules,
        calls=sum(use.calls for use in own),
        device_ns=device_ns,
        share=device_ns / total_ns if total_ns else 0.0,
    )


def operator_of(signature: str) -> str:
    """Return the operator of a call's signature, for example ``aten::mm``."""
    return signature.partition(FIELD)[0]


def coverage(kinds: Iterable[KernelKind]) -> float:
    """Return the fraction of device time whose cost is not a default; 1 where nothing ran."""
    kinds = tuple(kinds)
    total = sum(k.device_ns for k in kinds)
    return sum(k.device_ns for k in kinds if k.source != "default") / total if total else 1.0


def kernel_error(uses: Iterable[KernelUse]) -> float:
    """Return the error of summed kernels if all err alike; negative where most are unknown."""
    known = total = 0
    weighted = 0.0
    for use in uses:
        total += use.total_ns
        if use.error >= 0:
            known += use.total_ns
            weighted += use.total_ns * use.error
    return weighted / known if 2 * known > total else -1.0


def eager_regions(emulated: Iterable[Emulated]) -> tuple[EagerRegion, ...]:
    """Merge the eager regions of all captured ranks, most frequent first."""
    regions = _merged(region for rank in emulated for region in rank.eager_regions)
    return tuple(sorted(regions, key=lambda r: (-r.count, r.region)))


def value_uses(emulated: Iterable[Emulated]) -> tuple[ValueUse, ...]:
    """Merge the value reads of all captured ranks, most frequent first."""
    uses = _merged(use for rank in emulated for use in rank.values)
    return tuple(sorted(uses, key=lambda u: (-u.count, u.call_site)))


def _merged(rows: Iterable[Counted]) -> list[Counted]:
    """Add up the counts of otherwise equal rows, in the order in which they first appear."""
    counts: dict[Counted, int] = {}
    for row in rows:
        key = replace(row, count=0)
        counts[key] = counts.get(key, 0) + row.count
    return [replace(row, count=count) for row, count in counts.items()]
