"""The kernel profile of one GPU: the constants of its rooflines and of its host costs.

A profile is a TOML file of this package (``cost/kernels/*.toml``). Every constant is either fitted
on public measurements, taken from a publication, or estimated; ``sources`` says which. A GPU that
nobody measured is *scaled*: it takes the efficiencies of another GPU, and the peaks, bandwidth,
multiprocessors and power of its own data sheet; its errors are wider.

Power: tensor cores that have fewer watts per FLOP/s of their peak reach a smaller share of it. The
share of the peak at the highest clock is proportional to the watts per FLOP/s, raised to
``POWER_EXPONENT`` for loads of milliseconds and to ``SUSTAINED_EXPONENT`` for loads of hours. Power
falls with the third power of the clock as long as the voltage falls with it, and linearly below
that, which gives exponents between 1/3 and 1. They are smaller where something other than power is
the limit, and larger where a part of the power does not depend on the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources

from prismscale.errors import UsageError, did_you_mean
from prismscale.typed_files import decode, parse

POWER_EXPONENT = 0.25
"""The constants of an early fit give 0.22 to 0.30 between A100, H100 and B200, two at a time."""
SUSTAINED_EXPONENT = 1.27
"""Fitted between the B200 and the H100, whose sustained products were measured: see
``tools/fit/fit_products.py``."""
_PROFILES = ("prismscale.cost", "kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRoofline:
    """Roofline of matrix products of one element type; see :mod:`prismscale.cost.kernel_tiles`."""

    peak_flops: float
    """Dense peak of the data sheet, FLOP/s."""
    efficiency: float
    """Share of the peak that infinitely large tiles would reach for a short time."""
    k_overhead: float
    """Inner steps (elements of K) that a tile's prologue and epilogue cost."""
    tile_overhead: float = 18.0
    """Elements of reuse at which a tile reaches half of ``efficiency``."""
    wave_rounding: float = 1.0
    """Share of the idle part of the last wave of tiles that still costs time."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth that products reach."""
    cache_factor: float = 3.0
    """Bandwidth of the L2 cache, relative to that of the memory."""
    base_ns: float = 2_000
    sustained_cap: float | None = None
    """Share of the peak that the power limit sustains; None: no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1.2 or self.peak_flops <= 0:
            raise UsageError(
                f"efficiency {self.efficiency} must lie in 0 … 1.2 and peak_flops be positive"
            )
        if not 0 <= self.wave_rounding <= 1:
            raise UsageError(f"wave_rounding {self.wave_rounding} must lie in 0 … 1")
        if min(self.memory_efficiency, self.cache_factor, self.sustained_cap or 1.0) <= 0:
            raise UsageError("memory_efficiency, cache_factor and sustained_cap must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductLibrary:
    """How a library's matrix products differ from cuBLAS's, for all element types.

    Such a library does not split K.
    """

    speed: float
    """Speed of large tiles, relative to cuBLAS's."""
    k_overhead: float
    memory_efficiency: float
    """This and ``k_overhead`` replace those of the :class:`GemmRoofline`."""

    def __post_init__(self) -> None:
        if min(self.speed, self.memory_efficiency) <= 0:
            raise UsageError("speed and memory_efficiency of a library must be positive")

    def of(self, roofline: GemmRoofline) -> GemmRoofline:
        """Return the library's roofline, where ``roofline`` is cuBLAS's."""
        return replace(
            roofline,
            efficiency=roofline.efficiency * self.speed,
            k_overhead=self.k_overhead,
            memory_efficiency=self.memory_efficiency,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRoofline:
    """Roofline of fused attention; see :mod:`prismscale.cost.attention_blocks`."""

    efficiency: float
    """Share of the element type's peak that infinitely large heads and sequences would reach."""
    head_overhead: float = 0.0
    """Cost of a score's exponential, in elements of a head."""
    fixed_order_overhead: float = 0.0
    """Cost of a score in a backward pass that sums in a fixed order, in elements of a head."""
    length_overhead: float = 0.0
    """Cost of a block of queries beside the keys that it reads, in keys."""
    causal_overhead: float = 0.0
    """Further cost of a block under a causal mask, in keys."""
    causal_factor: float = 1.0
    """Relative throughput under a mask, on the work that the mask leaves."""
    wave_rounding: float = 1.0
    """Share of the idle part of the last wave of blocks that still costs time."""
    memory_efficiency: float = 0.9
    """Share of the memory bandwidth that attention reaches."""
    base_ns: float = 5_000

    def __post_init__(self) -> None:
        if min(self.efficiency, self.causal_factor, self.memory_efficiency) <= 0:
            raise UsageError(
                "efficiency, causal_factor and memory_efficiency of attention must be positive"
            )
        if not 0 <= self.wave_rounding <= 1:
            raise UsageError(f"wave_rounding {self.wave_rounding} must lie in 0 … 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoofline:
    """Roofline of memory-bound kernels; see :mod:`prismscale.cost.kernel_memory`."""

    efficiency: float
    """Share of the memory bandwidth that large tensors reach."""
    base_ns: float
    """Time of one kernel that does nothing."""
    launches: int = 1
    """Kernels that one call launches."""
    passes: float = 1.0
    """Times that the call's bytes cross the memory bus."""
    row_bytes: float = 0.0
    """Further bytes that each row of the first operand costs."""
    rereads: float = 0.0
    """Times that rows of 8,192 elements and more are read again, because no cache holds them. From
    4,096 to 8,192 elements this number grows from 0."""
    elements_per_s: float = 0.0
    """Highest rate of kernels that load one element at a time, because operands differ in shape or
    the result has a wider element type; 0: the bandwidth is the only limit."""
    transposed: float = 1.0
    """Share of ``efficiency`` that is left where an operand is transposed against the result."""
    accumulating: float = 1.0
    """Share of ``efficiency`` that is left where a scatter adds to its target."""

    def __post_init__(self) -> None:
        if min(self.efficiency, self.transposed, self.accumulating) <= 0:
            raise UsageError("efficiency, transposed and accumulating must be positive")
        if self.elements_per_s < 0:
            raise UsageError("elements_per_s must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """The L2 cache, from which a kernel reads what the kernel before it has written."""

    bytes: float
    """Size on the data sheet."""
    speed: float
    """Bandwidth relative to that of the memory."""

    def __post_init__(self) -> None:
        if min(self.bytes, self.speed) <= 0:
            raise UsageError("bytes and speed of a cache must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCost:
    """Cost of copies between a device and the host, or another device."""

    bandwidth_bytes_per_s: float
    base_ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Time per call of the thread that runs the program."""

    op_ns: float
    """Time of a call with one launch: Python, dispatcher, autograd and the launch.

    Calls of compiled graphs and communications take as long; their kernels are priced apart.
    """
    view_ns: float
    """Time of a call that launches nothing."""
    launch_ns: float
    """Time of each launch after a call's first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProfile:
    """The constants of one GPU's kernels."""

    name: str
    device: str
    """Name that ``torch.cuda.get_device_name`` returns."""
    multiprocessors: int
    memory_bandwidth_bytes_per_s: float
    host: HostCost
    transfer: TransferCost
    gemm: Mapping[str, GemmRoofline]
    """By element type as C++ spells it (``BFloat16``)."""
    attention: Mapping[str, AttentionRoofline]
    """By implementation (``flash``, ``flash_3``, ``cudnn``, ``efficient``, ``flex``), followed by
    ``_fp8`` or the element type in lower case where that has constants of its own, and by
    ``_backward`` for the backward pass."""
    memory: Mapping[str, MemoryRoofline]
    """By kind of kernel."""
    libraries: Mapping[str, ProductLibrary] = field(default_factory=dict)
    """Libraries with products of their own, by the namespace of their operators (``triton``)."""
    cache: Cache | None = None
    """None: every operand comes from memory."""
    peer: TransferCost | None = None
    """Access to the memory of another GPU of the node; None: over the bus, as to the host."""
    power_watts: float | None = None
    """Power limit on the data sheet; None: not known, and taken to grow with the peak."""
    clock_headroom: float = 1.0
    """Highest clock, relative to the clock to which the data sheet's peaks refer."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error by kind: p90 on measurements that were not fitted, or an estimate. The key
    ``triton`` is for all kernels whose work is read off their Triton source."""
    scaled_from: str | None = None
    own_products: tuple[str, ...] = ()
    """Element types whose products were measured on this GPU, where the rest is scaled."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.multiprocessors < 1 or self.memory_bandwidth_bytes_per_s <= 0:
            raise UsageError("multiprocessors and memory bandwidth must be positive")
        if "Float" not in self.gemm or "unknown" not in self.memory:
            raise UsageError("a profile needs the rooflines gemm.Float and memory.unknown")

    def burst(self) -> KernelProfile:
        """Return the profile without power limit, for benchmarks too short to be slowed by it."""
        gemm = {dtype: replace(r, sustained_cap=None) for dtype, r in self.gemm.items()}
        return replace(self, gemm=gemm)

    def cold(self) -> KernelProfile:
        """Return the profile without cache: some benchmarks empty it before each kernel."""
        return replace(self, cache=None)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the GPUs that :meth:`load` knows."""
        files = resources.files(_PROFILES[0]).joinpath(_PROFILES[1]).iterdir()
        return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".toml")))

    @classmethod
    def load(cls, gpu: str) -> KernelProfile:
        """Read the profile of ``gpu``.

        Raises:
            UsageError: there is no such GPU; the message lists the known ones.
        """
        if gpu not in cls.names():
            raise UsageError(f"no kernel profile for GPU '{gpu}'; {did_you_mean(gpu, cls.names())}")
        file = resources.files(_PROFILES[0]).joinpath(_PROFILES[1], f"{gpu}.toml")
        return cls.from_toml(file.read_text(encoding="utf-8"), origin=f"kernel profile {gpu}")

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "kernel profile") -> KernelProfile:
        """Read a profile from TOML text; a text with ``scaled_from`` holds a :class:`ScaledGpu`.

        Raises:
            FormatError: not TOML, or a key is missing, unknown, or of the wrong type or range.
        """
        table = parse(text, origin)
        if "scaled_from" in table:
            return decode(ScaledGpu, table, origin).profile()
        return decode(cls, table, origin)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledGpu:
    """A GPU that is described by its data sheet, relative to a measured GPU."""

    name: str
    device: str
    scaled_from: str
    multiprocessors: int
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """By element type as C++ spells it; types that are left out keep the other GPU's peak."""
    power_watts: float | None = None
    """Power limit; None: not known, and taken to grow with the peak."""
    clock_headroom: float = 1.0
    """Highest clock, relative to the clock to which the data sheet's peaks refer."""
    exponentials: float = 1.0
    """Exponentials per FLOP of a product, relative to the other GPU."""
    gemm: Mapping[str, GemmRoofline] = field(default_factory=dict)
    """Products that were measured on this GPU, by element type."""
    attention: Mapping[str, AttentionRoofline] = field(default_factory=dict)
    """Attention that was measured on this GPU, by implementation."""
    memory: Mapping[str, MemoryRoofline] = field(default_factory=dict)
    """Kernels that were measured on this GPU, by kind."""
    libraries: Mapping[str, ProductLibrary] = field(default_factory=dict)
    """Libraries whose products were measured on this GPU."""
    cache_bytes: float | None = None
    """Size of the L2 cache; None: the other GPU's."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Errors by kind, where this GPU's own are known."""
    peer: TransferCost | None = None
    """None, here and for ``transfer``: the other GPU's."""
    transfer: TransferCost | None = None
    host: HostCost | None = None
    error_factor: float = 2.0
    """Factor on the other GPU's errors."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.exponentials <= 0:
            raise UsageError(f"exponentials is {self.exponentials}; it must be positive")

    def profile(self) -> KernelProfile:
        """Return the other GPU's efficiencies, shifted for power, on this one's peaks."""
        other = KernelProfile.load(self.scaled_from)
        scaled = {dtype: self._products(other, dtype) for dtype in other.gemm}
        return replace(
            other,
            name=self.name,
            device=self.device,
            multiprocessors=self.multiprocessors,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            power_watts=self.power_watts,
            clock_headroom=self.clock_headroom,
            gemm={**scaled, **self.gemm},
            attention=self._attention(other) | dict(self.attention),
            memory=self._memory(other) | dict(self.memory),
            libraries={**other.libraries, **self.libraries},
            cache=other.cache and self._cache(other, other.cache),
            peer=self.peer or other.peer,
            transfer=self.transfer or other.transfer,
            host=self.host or other.host,
            errors={k: self.error_factor * e for k, e in other.errors.items()} | dict(self.errors),
            scaled_from=self.scaled_from,
            own_products=tuple(self.gemm),
            sources=self.sources,
        )

    def _attention(self, other: KernelProfile) -> dict[str, AttentionRoofline]:
        shift = self._shift(other, "BFloat16", POWER_EXPONENT)
        return {
            family: replace(
                roofline,
                efficiency=roofline.efficiency * shift,
                head_overhead=roofline.head_overhead / self.exponentials,
            )
            for family, roofline in other.attention.items()
        }

    def _memory(self, other: KernelProfile) -> dict[str, MemoryRoofline]:
        """Scale the rate of loading one element at a time with the number of multiprocessors."""
        more = self.multiprocessors / other.multiprocessors
        return {
            kind: replace(roofline, elements_per_s=roofline.elements_per_s * more)
            for kind, roofline in other.memory.items()
        }

    def _cache(self, other: KernelProfile, cache: Cache) -> Cache:
        return Cache(
            bytes=self.cache_bytes or cache.bytes,
            speed=cache.speed * self._cache_shift(other, "BFloat16"),
        )

    def _cache_shift(self, other: KernelProfile, dtype: str) -> float:
        """Return the factor on the other GPU's ratio of cache bandwidth to memory bandwidth.

        Caches are built for the tensor cores that they feed: their bandwidth grows with the peak,
        as from A100 to B200 (11 to 14 bytes per 1,000 FLOP), and not with the memory's.
        """
        theirs = other.gemm[dtype].peak_flops
        peaks = self.peak_flops.get(dtype, theirs) / theirs
        return peaks * other.memory_bandwidth_bytes_per_s / self.memory_bandwidth_bytes_per_s

    def _products(self, other: KernelProfile, dtype: str) -> GemmRoofline:
        roofline = other.gemm[dtype]
        cap = roofline.sustained_cap
        return replace(
            roofline,
            peak_flops=self.peak_flops.get(dtype, roofline.peak_flops),
            efficiency=min(1.2, roofline.efficiency * self._shift(other, dtype, POWER_EXPONENT)),
            cache_factor=roofline.cache_factor * self._cache_shift(other, dtype),
            sustained_cap=cap and cap * self._shift(other, dtype, SUSTAINED_EXPONENT),
        )

    def _shift(self, other: KernelProfile, dtype: str, exponent: float) -> float:
        """Return the factor on the share of the data sheet's peak that the other GPU reaches."""
        headroom = self.clock_headroom / other.clock_headroom
        if self.power_watts is None or other.power_watts is None:
            return headroom
        theirs = other.gemm[dtype].peak_flops
        peaks = self.peak_flops.get(dtype, theirs) / theirs
        watts = self.power_watts / other.power_watts
        found = headroom * (watts / (peaks * headroom)) ** exponent
        # An exponent above 1 would make a GPU slower by giving it more units and as many watts.
        return max(found, min(1.0, 1.0 / peaks)) if watts >= 1 else found
