"""What is known of one GPU's kernels: the constants of the rooflines in ``kernel_gemm`` and the
rest.

A profile is a TOML file of this package (``cost/kernels/*.toml``). Every constant is either fitted
on public measurements, taken from a publication, or estimated; ``sources`` says which. A GPU that
nobody measured is *scaled*: it takes the efficiencies of another one, and its own data sheet's
peaks, bandwidth and multiprocessors; its errors are wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources

from prismscale.errors import UsageError, did_you_mean
from prismscale.typed_files import decode, parse

_PROFILES = ("prismscale.cost", "kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRoofline:
    """Matrix products of one element type; see :func:`prismscale.cost.kernel_gemm.gemm_ns`."""

    peak_flops: float
    """Dense peak of the data sheet, FLOP/s."""
    efficiency: float
    """Share of the peak inside a long inner loop of the largest tile."""
    k_overhead: float
    """Inner steps (elements of K) that a tile's prologue and epilogue cost."""
    small_tile_factor: float = 0.8
    """Throughput of a tile of a quarter of the size, relative to the largest."""
    base_ns: float = 2_000

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1.2 or self.peak_flops <= 0:
            raise UsageError(
                f"efficiency {self.efficiency} must lie in 0 … 1.2 and peak_flops be positive"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRoofline:
    """Fused attention; see :func:`prismscale.cost.kernel_attention.attention_ns`."""

    efficiency: float
    """Share of the element type's peak that long sequences reach with heads of 128."""
    small_head_factor: float
    """Relative throughput with heads of 64."""
    length_overhead: float
    """Keys that a block of queries costs on top of those it reads."""
    causal_factor: float = 1.0
    """Relative throughput under a causal mask, of the half of the work that is left: blocks on the
    diagonal are computed whole, and blocks of queries differ in length."""
    base_ns: float = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoofline:
    """Kernels bound by memory; see :func:`prismscale.cost.kernel_memory.memory_ns`."""

    efficiency: float
    """Share of the memory bandwidth that large tensors reach."""
    base_ns: float
    """Of one kernel that does nothing."""
    launches: int = 1
    """Kernels that one call starts."""
    passes: float = 1.0
    """Times that the call's bytes cross the memory bus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCost:
    """Copies between a device and the host, or another device."""

    bandwidth_bytes_per_s: float
    base_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Time of the thread that runs the program, per call."""

    op_ns: float
    """Python, dispatcher, autograd and one launch."""
    view_ns: float
    """A call that launches nothing."""
    launch_ns: float
    """Each launch after a call's first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProfile:
    """One GPU."""

    name: str
    device: str
    """As ``torch.cuda.get_device_name`` says."""
    multiprocessors: int
    memory_bandwidth_bytes_per_s: float
    host: HostCost
    transfer: TransferCost
    gemm: Mapping[str, GemmRoofline]
    """By element type as C++ spells it (``BFloat16``)."""
    attention: Mapping[str, AttentionRoofline]
    """By operator family (``flash``, ``efficient``, ``cudnn``), ``_backward`` appended."""
    memory: Mapping[str, MemoryRoofline]
    """By kind."""
    peer: TransferCost | None = None
    """Of memory of another GPU of the node; None: over the bus, as to the host."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error by kind: p90 on measurements that were not fitted, or an estimate."""
    scaled_from: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.multiprocessors < 1 or self.memory_bandwidth_bytes_per_s <= 0:
            raise UsageError("multiprocessors and memory bandwidth must be positive")
        if "Float" not in self.gemm or "unknown" not in self.memory:
            raise UsageError("a profile needs the rooflines gemm.Float and memory.unknown")

    @staticmethod
    def names() -> tuple[str, ...]:
        """GPUs that :meth:`load` knows."""
        files = resources.files(_PROFILES[0]).joinpath(_PROFILES[1]).iterdir()
        return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".toml")))

    @classmethod
    def load(cls, gpu: str) -> KernelProfile:
        """Read the profile of ``gpu``.

        Raises:
            UsageError: no such GPU; lists those that are known.
        """
        if gpu not in cls.names():
            raise UsageError(f"no kernel profile for GPU '{gpu}'; {did_you_mean(gpu, cls.names())}")
        file = resources.files(_PROFILES[0]).joinpath(_PROFILES[1], f"{gpu}.toml")
        return cls.from_toml(file.read_text(encoding="utf-8"), origin=f"kernel profile {gpu}")

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "kernel profile") -> KernelProfile:
        """Read a profile from TOML text; one with ``scaled_from`` and no rooflines is scaled.

        Raises:
            FormatError: not TOML, or a key is missing, unknown, or of the wrong type or range.
        """
        table = parse(text, origin)
        if "scaled_from" in table:
            return decode(ScaledGpu, table, origin).profile()
        return decode(cls, table, origin)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledGpu:
    """A GPU by its data sheet, relative to a measured one."""

    name: str
    device: str
    scaled_from: str
    multiprocessors: int
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """By element type as C++ spells it; types that are left out keep the other GPU's."""
    peer: TransferCost | None = None
    """None: the other GPU's."""
    error_factor: float = 2.0
    """How much wider the errors are than the other GPU's."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def profile(self) -> KernelProfile:
        """The other GPU's efficiencies on this one's peaks."""
        other = KernelProfile.load(self.scaled_from)
        gemm = {
            dtype: replace(roofline, peak_flops=self.peak_flops.get(dtype, roofline.peak_flops))
            for dtype, roofline in other.gemm.items()
        }
        return replace(
            other,
            name=self.name,
            device=self.device,
            multiprocessors=self.multiprocessors,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            gemm=gemm,
            peer=self.peer or other.peer,
            errors={kind: self.error_factor * e for kind, e in other.errors.items()},
            scaled_from=self.scaled_from,
            sources=self.sources,
        )
