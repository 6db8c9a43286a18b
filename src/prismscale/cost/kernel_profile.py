"""What is known of one GPU's kernels: the constants of the rooflines in ``kernel_gemm`` and the
rest.

A profile is a TOML file of this package (``cost/kernels/*.toml``). Every constant is either fitted
on public measurements, taken from a publication, or estimated; ``sources`` says which. A GPU that
nobody measured is *scaled*: it takes the efficiencies of another one, and its own data sheet's
peaks, bandwidth, multiprocessors and power; its errors are wider.

Power: tensor cores that have fewer watts for each FLOP/s of their peak reach a smaller share of it.
The share of the highest clock's peak goes with the watts for each FLOP/s to the power of
``POWER_EXPONENT`` for milliseconds and ``SUSTAINED_EXPONENT`` for hours. Power falls with the third
power of the clock as long as the voltage falls with it, and in proportion below that: exponents
between 1/3 and 1, less where something else than power is the limit, more where a part of the power
goes to what no clock slows down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources

from prismscale.errors import UsageError, did_you_mean
from prismscale.typed_files import decode, parse

POWER_EXPONENT = 0.25
"""Between A100, H100 and B200, two at a time, by constants of an early fit: 0.22 to 0.30."""
SUSTAINED_EXPONENT = 1.27
"""Between the B200 and the H100, of which sustained products were measured: see
``tools/fit/fit_products.py``."""
_PROFILES = ("prismscale.cost", "kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRoofline:
    """Matrix products of one element type; see :mod:`prismscale.cost.kernel_tiles`."""

    peak_flops: float
    """Dense peak of the data sheet, FLOP/s."""
    efficiency: float
    """Share of the peak that tiles without end would reach, for a short time."""
    k_overhead: float
    """Inner steps (elements of K) that a tile's prologue and epilogue cost."""
    tile_overhead: float = 18.0
    """Elements of reuse at which a tile reaches half of ``efficiency``."""
    wave_rounding: float = 1.0
    """Share of a started wave of tiles that is paid though multiprocessors idle."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth that products reach."""
    cache_factor: float = 3.0
    """Bandwidth of the L2 cache, relative to that of the memory."""
    base_ns: float = 2_000
    sustained_cap: float | None = None
    """Share of the peak that the power limit lets last; None: no limit."""

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
    """How the products of a library differ from cuBLAS's, whatever the element type. It does not
    split K."""

    speed: float
    """Of large tiles, relative to cuBLAS's."""
    k_overhead: float
    memory_efficiency: float
    """As a :class:`GemmRoofline` has them."""

    def __post_init__(self) -> None:
        if min(self.speed, self.memory_efficiency) <= 0:
            raise UsageError("speed and memory_efficiency of a library must be positive")

    def of(self, roofline: GemmRoofline) -> GemmRoofline:
        """The library's roofline, where ``roofline`` is cuBLAS's."""
        return replace(
            roofline,
            efficiency=roofline.efficiency * self.speed,
            k_overhead=self.k_overhead,
            memory_efficiency=self.memory_efficiency,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRoofline:
    """Fused attention; see :mod:`prismscale.cost.attention_blocks`."""

    efficiency: float
    """Share of the element type's peak that heads and sequences without end would reach."""
    head_overhead: float = 0.0
    """Elements of a head that the exponential of a score costs."""
    length_overhead: float = 0.0
    """Keys that a block of queries costs on top of those it reads."""
    causal_overhead: float = 0.0
    """More of them under a causal mask."""
    causal_factor: float = 1.0
    """Relative throughput under a mask, of the work that is left."""
    wave_rounding: float = 1.0
    """Share of a started wave of blocks that is paid though multiprocessors idle."""
    memory_efficiency: float = 0.9
    """Share of the memory bandwidth."""
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
    """Kernels bound by memory; see :func:`prismscale.cost.kernel_memory.memory_ns`."""

    efficiency: float
    """Share of the memory bandwidth that large tensors reach."""
    base_ns: float
    """Of one kernel that does nothing."""
    launches: int = 1
    """Kernels that one call starts."""
    passes: float = 1.0
    """Times that the call's bytes cross the memory bus."""
    row_bytes: float = 0.0
    """Bytes that each row of the first operand costs beside its own."""
    rereads: float = 0.0
    """Times that rows of 8,192 elements and more, which no cache holds, are read again; from 4,096
    on a part of it."""
    elements_per_s: float = 0.0
    """Most that kernels reach which load one element at a time, because operands differ in shape or
    the result is of a wider element type; 0: as many as the bandwidth lets through."""
    transposed: float = 1.0
    """Share of ``efficiency`` that is left where the rows of operands lie across each other."""
    accumulating: float = 1.0
    """Share of ``efficiency`` that is left where a scatter adds to what is there."""

    def __post_init__(self) -> None:
        if min(self.efficiency, self.transposed, self.accumulating) <= 0:
            raise UsageError("efficiency, transposed and accumulating must be positive")
        if self.elements_per_s < 0:
            raise UsageError("elements_per_s must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """The level-2 cache, from which a kernel reads what the one before it has written."""

    bytes: float
    """Of the data sheet."""
    speed: float
    """Bandwidth relative to that of the memory."""

    def __post_init__(self) -> None:
        if min(self.bytes, self.speed) <= 0:
            raise UsageError("bytes and speed of a cache must be positive")


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
    """By implementation (``flash``, ``flash_3``, ``cudnn``, ``efficient``, ``flex``), with ``_fp8``
    or the element type in small letters where that has constants of its own, and ``_backward``."""
    memory: Mapping[str, MemoryRoofline]
    """By kind."""
    libraries: Mapping[str, ProductLibrary] = field(default_factory=dict)
    """Whose products are not cuBLAS's, by the namespace of their operators (``triton``)."""
    cache: Cache | None = None
    """None: every operand comes from memory."""
    peer: TransferCost | None = None
    """Of memory of another GPU of the node; None: over the bus, as to the host."""
    power_watts: float | None = None
    """Limit of the data sheet; None: not known, and taken to grow with the peak."""
    clock_headroom: float = 1.0
    """Highest clock relative to the one that the data sheet's peaks are for."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error by kind: p90 on measurements that were not fitted, or an estimate; ``triton``
    is that of all kernels that were read off their source."""
    scaled_from: str | None = None
    own_products: tuple[str, ...] = ()
    """Element types whose products were measured, where the rest is scaled."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.multiprocessors < 1 or self.memory_bandwidth_bytes_per_s <= 0:
            raise UsageError("multiprocessors and memory bandwidth must be positive")
        if "Float" not in self.gemm or "unknown" not in self.memory:
            raise UsageError("a profile needs the rooflines gemm.Float and memory.unknown")

    def burst(self) -> KernelProfile:
        """The GPU for as long as its power limit is not felt: a benchmark of single kernels."""
        gemm = {dtype: replace(r, sustained_cap=None) for dtype, r in self.gemm.items()}
        return replace(self, gemm=gemm)

    def cold(self) -> KernelProfile:
        """The GPU whose cache was emptied before each kernel, as some benchmarks do."""
        return replace(self, cache=None)

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
    power_watts: float | None = None
    """None: not known, and taken to grow with the peak."""
    clock_headroom: float = 1.0
    """Highest clock relative to the one that the data sheet's peaks are for."""
    exponentials: float = 1.0
    """How many for each FLOP of a product, relative to the other GPU."""
    gemm: Mapping[str, GemmRoofline] = field(default_factory=dict)
    """Products that were measured on this GPU, by element type."""
    attention: Mapping[str, AttentionRoofline] = field(default_factory=dict)
    """Attention that was measured on this GPU, by implementation."""
    memory: Mapping[str, MemoryRoofline] = field(default_factory=dict)
    """Kernels that were measured on this GPU, by kind."""
    libraries: Mapping[str, ProductLibrary] = field(default_factory=dict)
    """Whose products were measured on this GPU."""
    cache_bytes: float | None = None
    """Of its level-2 cache; None: the other GPU's."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """By kind, where this GPU's own are known."""
    peer: TransferCost | None = None
    """None, here and below: the other GPU's."""
    transfer: TransferCost | None = None
    host: HostCost | None = None
    error_factor: float = 2.0
    """How much wider the errors are than the other GPU's."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.exponentials <= 0:
            raise UsageError(f"exponentials is {self.exponentials}; it must be positive")

    def profile(self) -> KernelProfile:
        """The other GPU's efficiencies on this one's peaks, shifted by what power allows."""
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
        """What loads one element at a time is as fast as there are multiprocessors."""
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
        """Caches are built for the tensor cores that they feed: their bandwidth goes with the peak,
        as it does from A100 to B200 (11 to 14 bytes for 1,000 FLOP), not with the memory's."""
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
        """What the share of the data sheet's peak is multiplied with."""
        headroom = self.clock_headroom / other.clock_headroom
        if self.power_watts is None or other.power_watts is None:
            return headroom
        theirs = other.gemm[dtype].peak_flops
        peaks = self.peak_flops.get(dtype, theirs) / theirs
        watts = self.power_watts / other.power_watts
        found = headroom * (watts / (peaks * headroom)) ** exponent
        # An exponent above 1 would make a GPU slower by giving it more units and as many watts.
        return max(found, min(1.0, 1.0 / peaks)) if watts >= 1 else found
