"""The target cluster: devices, links, and how communications behave on them.

A :class:`Cluster` is read from TOML: either a preset of this package or the user's own file, which
may name a preset as its ``base`` and give only the differences. A cluster has no fixed size: rank
``r`` is on node ``r // devices_per_node`` whatever the world size is. All bandwidths are those of
one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prismscale.errors import FormatError, UsageError, did_you_mean
from prismscale.graph.node import CollectiveOp
from prismscale.typed_files import decode, encode, overlaid, parse, read

_PROFILES = "prismscale.cost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Factors on modelled times, fitted to measured steps by ``prismscale calibrate steps``."""

    kernels: float = 1.0
    """Kernel time relative to the model. Kernels that were measured keep their own times."""
    host: float = 1.0
    """Host time for issuing kernels, relative to the model."""
    host_error: float
    """Relative amount by which the host time may be longer, in nine cases of ten."""
    steps: int
    """Number of measured steps on which the factors are based."""

    def __post_init__(self) -> None:
        _require_positive(self, "kernels", "host", "host_error", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak by torch dtype name (``bfloat16``, ``float8_e4m3fn``, ``tfloat32``, …)."""
    scaled_from: str = ""
    """For a GPU that is not known: the preset of a known GPU from which its kernel model is scaled.
    See :func:`prismscale.cost.target_gpu.profile_of`."""
    multiprocessors: int | None = None
    """Number of multiprocessors. None, here and below: as in the known GPU."""
    power_watts: float | None = None
    """Power limit. If it is None and the peaks differ from the known GPU's, it grows with them."""
    cache_bytes: float | None = None
    """Size of the level-2 cache."""
    calibration: Calibration | None = None
    """None: modelled times are used as they are."""

    def __post_init__(self) -> None:
        optional = ("memory_bandwidth_bytes_per_s", "multiprocessors", "power_watts", "cache_bytes")
        given = (name for name in optional if getattr(self, name) is not None)
        _require_positive(self, "memory_bytes", *given)
        for dtype, peak in self.peak_flops.items():
            if not peak > 0:
                raise UsageError(f"peak_flops.{dtype} is {peak}; it must be more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link in one direction: NVLink of one device, or one network card."""

    latency_ns: float
    """Latency from one member to the next, for a message of no bytes."""
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        _require_positive(self, "latency_ns", "bandwidth_bytes_per_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Switches above the nodes: pods in which all network cards reach each other at full speed."""

    nodes_per_pod: int
    """Consecutive nodes under the same leaf switches (rail-optimised: one leaf per rail)."""
    oversubscription: float = 1.0
    """Bandwidth of a pod's network cards divided by that of its uplinks; 1 is a full fat tree."""

    def __post_init__(self) -> None:
        _require_positive(self, "nodes_per_pod")
        if self.oversubscription < 1:
            raise UsageError(f"oversubscription is {self.oversubscription}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmTuning:
    """How well one collective algorithm uses the links. See :mod:`prismscale.cost.algorithms`."""

    base_ns: float
    """Fixed cost of one communication: launch and set-up."""
    latency_factor: float
    """Cost of one step of the algorithm, in link latencies."""
    intra_efficiency: float
    """Share of the intra-node link's bandwidth that the algorithm reaches."""
    inter_efficiency: float
    """Share of the network cards' bandwidth that the algorithm reaches."""
    chunk_ns: float
    """Cost of handling one piece of a message that is cut into pieces."""
    chunk_limit_ns: float
    """Time on the wire of a message beyond which its pieces do not grow any more."""
    inter_latency_factor: float | None = None
    """``latency_factor`` of a step between nodes; None: as inside a node."""
    spanning_latency_factor: float | None = None
    """``latency_factor`` of a step inside a node, in a group of several nodes; None: as in a group
    on one node."""
    own_copy: float = 0.0
    """Time to copy a byte of a member's own share, relative to the time of a byte over NVLink."""
    min_members_per_node: int = 1
    """The algorithm is only used where every node holds at least this many members."""

    def __post_init__(self) -> None:
        _require_positive(self, "intra_efficiency", "inter_efficiency", "chunk_limit_ns")
        _require_positive(self, "min_members_per_node")
        for name in ("base_ns", "latency_factor", "chunk_ns", "own_copy"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCurve:
    """Measured times of one operation in groups of one size, by message bytes."""

    op: CollectiveOp
    group_size: int
    nodes: int = 1
    """Number of nodes that the group spanned, evenly filled."""
    n_bytes: tuple[int, ...]
    """Message sizes, ascending."""
    time_ns: tuple[float, ...]
    """Time after the last arrival, for each size."""

    def __post_init__(self) -> None:
        if not self.n_bytes or len(self.n_bytes) != len(self.time_ns):
            raise UsageError(f"{len(self.n_bytes)} sizes for {len(self.time_ns)} times")
        if any(b <= a for a, b in zip(self.n_bytes, self.n_bytes[1:], strict=False)):
            raise UsageError(f"sizes {list(self.n_bytes)} must ascend")
        if self.n_bytes[0] < 1 or self.group_size < 2 or min(self.time_ns) <= 0:
            raise UsageError("sizes and times must be positive, and groups have 2 members or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Communication times measured on a machine, with the machine's description."""

    machine: str
    date: str
    curves: tuple[MeasuredCurve, ...]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A homogeneous cluster of nodes, for any number of ranks."""

    name: str
    device: Device
    devices_per_node: int
    nics_per_node: int
    nodes_per_nvlink_domain: int = 1
    """Consecutive nodes whose devices reach each other over NVLink; 18 in an NVL72."""
    intra_node: Link
    """The NVLink of each device."""
    inter_node: Link
    """The link of each network card."""
    overlap_power: float = 6.0
    """Sharpness of the smooth minimum of NVLink and network bandwidth; ∞ is the plain minimum."""
    algorithms: Mapping[str, AlgorithmTuning] = field(default_factory=dict)
    fabric: Fabric | None = None
    """Switches above the nodes; None: every network card reaches every other at full speed."""
    measured: Measured | None = None
    variability: str = ""
    """Variability profile for modelled durations: a preset's name or a TOML file; empty: none.
    See :mod:`prismscale.cost.variability`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of each figure."""

    def __post_init__(self) -> None:
        _require_positive(self, "devices_per_node", "nics_per_node", "overlap_power")
        _require_positive(self, "nodes_per_nvlink_domain")
        if self.fabric and self.fabric.nodes_per_pod % self.nodes_per_nvlink_domain:
            raise UsageError(
                f"fabric.nodes_per_pod is {self.fabric.nodes_per_pod}; it must be a multiple of "
                f"nodes_per_nvlink_domain, {self.nodes_per_nvlink_domain}"
            )

    @property
    def devices_per_domain(self) -> int:
        """Number of ranks that reach each other over NVLink."""
        return self.devices_per_node * self.nodes_per_nvlink_domain

    @property
    def nics_per_domain(self) -> int:
        """Number of network cards of an NVLink domain."""
        return self.nics_per_node * self.nodes_per_nvlink_domain

    @property
    def domains_per_pod(self) -> int:
        """Number of NVLink domains in a pod; 0 where the cluster describes no fabric."""
        return self.fabric.nodes_per_pod // self.nodes_per_nvlink_domain if self.fabric else 0

    @property
    def processor_communicates(self) -> bool:
        """True where communication runs on the cores that compute (gloo on CPUs)."""
        return self.device.name == "CPU"

    def node_of(self, rank: int) -> int:
        """Return the node that hosts ``rank``."""
        return rank // self.devices_per_node

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of all presets, which :meth:`load` takes."""
        files = resources.files(_PROFILES).joinpath("profiles").iterdir()
        return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".toml")))

    @staticmethod
    @cache
    def presets_by_gpu() -> Mapping[str, str]:
        """Return the presets' names by the name of their device."""
        names = {Cluster.load(preset).device.name: preset for preset in Cluster.presets()}
        return MappingProxyType(names)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Cluster:
        """Read a preset by name, or a TOML file by path.

        Raises:
            UsageError: no such preset or file.
            FormatError: the file is damaged; the message names the key.
        """
        given = str(name_or_path)
        if given in cls.presets():
            return cls.from_toml(_preset_text(given), origin=f"preset {given}")
        path = Path(given)
        if path.suffix != ".toml" and not path.is_file():
            allowed = did_you_mean(given, cls.presets())
            raise UsageError(f"unknown cluster '{given}'; {allowed}; or the path of a .toml file")
        return cls._of_table(read(path, "cluster file"), str(path))

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "cluster") -> Cluster:
        """Read a cluster from TOML text; ``origin`` names it in errors.

        Raises:
            FormatError: not TOML, or a key is missing, unknown, or of the wrong type or range.
        """
        return cls._of_table(parse(text, origin), origin)

    @classmethod
    def _of_table(cls, table: Mapping[str, Any], origin: str) -> Cluster:
        return decode(cls, _with_base(table, origin), origin)

    def to_toml(self) -> str:
        """Return the text that :meth:`from_toml` reads back as an equal cluster."""
        return encode(self)


def _preset_text(name: str) -> str:
    return resources.files(_PROFILES).joinpath("profiles", f"{name}.toml").read_text("utf-8")


def _with_base(table: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """Return a table completed, key by key, by the preset that it names as its ``base``.

    A preset may have a base, too.
    """
    if "base" not in table:
        return table
    base, presets = table["base"], Cluster.presets()
    if base not in presets:
        raise FormatError(f"{origin}: base is {base!r}; {did_you_mean(str(base), presets)}")
    own = {key: value for key, value in table.items() if key != "base"}
    preset = f"preset {base}"
    return overlaid(_with_base(parse(_preset_text(base), preset), preset), own)


def _require_positive(owner: Any, *names: str) -> None:
    for name in names:
        if not getattr(owner, name) > 0:
            raise UsageError(f"{name} is {getattr(owner, name)}; it must be more than 0")
