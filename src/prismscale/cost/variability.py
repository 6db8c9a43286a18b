"""A *variability profile*: how much the durations of a fleet's kernels and communications vary.

A profile is a TOML file, of this package (``cost/variability_profiles/*.toml``) or of the user. A
cluster preset names one. It varies the durations that a model answered:

- *temporal*: one kernel, or one communication, from one execution to the next;
- *spatial*: devices and links that are slower than others for the whole run;
- *links*: communications, by the links that they cross (:data:`SCOPES`), with a tail;
- *stalls*: a node that stops for a moment, or, rarely, for seconds;
- *regimes*: variation that all ranks of a step share.

Coefficients of variation (CV) are shares: 0.02 is 2 %. The median of every factor is 1, so that a
profile widens a forecast without changing its typical device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from prismscale.cost.kernel_kinds import KINDS
from prismscale.errors import UsageError, did_you_mean
from prismscale.typed_files import decode, encode, parse, read

_PACKAGE = ("prismscale.cost", "variability_profiles")
DEFAULT = "default"
"""Key for all kinds of kernels that a profile does not name."""
NVLINK, RAIL, PODS = SCOPES = ("nvlink", "rail", "pods")
"""Scopes of links: within a node; between nodes of one pod, card to card; between pods."""
SHORTEST_STEP_S = 0.15
"""The shortest step whose noise was measured; shorter ones are taken to vary as much."""
MOST_CV = 0.5
"""Largest allowed CV. No device exceeds it: GPUs of one fleet vary by 14 % at most (PRISM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelVariation:
    """Variation of the kernels of one kind."""

    temporal_cv: float = 0.0
    """From one execution to the next, on one device."""
    spatial_cv: float = 0.0
    """Between devices, constant during a run."""

    def __post_init__(self) -> None:
        _require_shares(self, "temporal_cv", "spatial_cv")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkVariation:
    """Variation of the communications of one scope."""

    temporal_cv: float = 0.0
    """From one execution of a communication to the next."""
    pair_cv: float = 0.0
    """Between pairs of devices (or of network cards), constant during a run; a collective takes the
    pace of its slowest pair."""
    tail_probability: float = 0.0
    """Probability that one execution is far slower than usual."""
    tail_factor: float = 1.0
    """Mean time of such an execution over its usual time. Half of the excess over 1 is fixed, the
    other half is the mean of an exponential distribution."""

    def __post_init__(self) -> None:
        _require_shares(self, "temporal_cv", "pair_cv", "tail_probability")
        if not 1 <= self.tail_factor <= 1000:
            raise UsageError(f"tail_factor is {self.tail_factor}; allowed: 1 … 1000")


@dataclass(frozen=True, kw_only=True, slots=True)
class StallVariation:
    """Nodes that stop for a moment: operating system, garbage collection, page faults."""

    per_node_hour: float = 0.0
    mean_s: float = 0.0
    """Mean length of a stall; lengths are exponential."""
    long_per_job_hour: float = 0.0
    """Rate of long stalls, in which the whole job waits for one of its nodes for seconds. In public
    logs they come per hour, and not more often in larger jobs; their cause is not recorded."""
    long_mean_s: float = 0.0
    """Mean length of a long stall; lengths are exponential."""

    def __post_init__(self) -> None:
        for name in ("per_node_hour", "long_per_job_hour"):
            value = getattr(self, name)
            if not 0 <= value <= 36_000:
                raise UsageError(f"{name} is {value}; allowed: 0 … 36,000")
        for name in ("mean_s", "long_mean_s"):
            value = getattr(self, name)
            if not 0 <= value <= 600:
                raise UsageError(f"{name} is {value}; allowed: 0 … 600 seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegimeVariation:
    """Variation that all ranks of a step share.

    Its causes are clocks under one power limit, the room's temperature, and the network's load.
    """

    cv_of_one_second: float = 0.0
    """CV of the mean pace over one second. Over longer times it averages out: a step of ``t``
    seconds varies by this CV over the square root of ``t``."""
    drift_cv: float = 0.0
    """CV of the pace from one step of a run to another, however long the steps are."""
    day_amplitude: float = 0.0
    """Amplitude of the pace over a day, a sine: runs at noon are slower than runs at night."""
    communication_cv: float = 0.0
    """CV of all communication between nodes in one step together."""

    def __post_init__(self) -> None:
        _require_shares(self, "cv_of_one_second", "drift_cv", "day_amplitude", "communication_cv")

    def step_cv(self, step_s: float) -> float:
        """Return the CV, within one run, of a step that takes ``step_s`` seconds."""
        counted_s = max(step_s, SHORTEST_STEP_S)
        return float((self.cv_of_one_second**2 / counted_s + self.drift_cv**2) ** 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class VariabilityProfile:
    """Variation of a fleet's kernels, links, nodes and steps."""

    name: str
    kernels: Mapping[str, KernelVariation] = field(default_factory=dict)
    """By kind of kernel; :data:`DEFAULT` for kinds that are not named."""
    node_share: float = 0.0
    """Share of the variance between devices that the devices of one node have in common."""
    links: Mapping[str, LinkVariation] = field(default_factory=dict)
    """By scope."""
    pod_nodes: int = 32
    """Nodes of one pod."""
    stalls: StallVariation = field(default_factory=StallVariation)
    regimes: RegimeVariation = field(default_factory=RegimeVariation)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from."""

    def __post_init__(self) -> None:
        for what, given, allowed in (
            ("kind of kernel", self.kernels, {*KINDS, DEFAULT}),
            ("scope of links", self.links, {*SCOPES}),
        ):
            for name in given:
                if name not in allowed:
                    raise UsageError(f"unknown {what} '{name}'; {did_you_mean(name, allowed)}")
        if not 0 <= self.node_share <= 1:
            raise UsageError(f"node_share is {self.node_share}; allowed: 0 … 1")
        if self.pod_nodes < 1:
            raise UsageError(f"pod_nodes is {self.pod_nodes}; a pod has 1 node or more")

    def kernel(self, kind: str) -> KernelVariation:
        """Return the variation of one kind of kernel."""
        return self.kernels.get(kind, self.kernels.get(DEFAULT, KernelVariation()))

    def link(self, scope: str) -> LinkVariation:
        """Return the variation of one scope of links."""
        return self.links.get(scope, LinkVariation())

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the presets that :meth:`load` knows."""
        package, folder = _PACKAGE
        files = resources.files(package).joinpath(folder).iterdir()
        return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".toml")))

    @classmethod
    def load(cls, name_or_path: str | Path) -> VariabilityProfile:
        """Read a preset by name, or a TOML file by path.

        Raises:
            UsageError: there is no such preset or file.
            FormatError: the file is damaged, or has figures that no fleet has; the message names
                the key.
        """
        given = str(name_or_path)
        if given in cls.presets():
            package, folder = _PACKAGE
            text = resources.files(package).joinpath(folder, f"{given}.toml").read_text("utf-8")
            return cls.from_toml(text, origin=f"variability profile {given}")
        path = Path(given)
        if path.suffix != ".toml" and not path.is_file():
            allowed = did_you_mean(given, (*cls.presets(), "none", "recorded"))
            raise UsageError(
                f"unknown variability '{given}'; {allowed}; or the path of a .toml file"
            )
        return decode(cls, _named(read(path, "variability profile"), path.stem), str(path))

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "variability profile") -> VariabilityProfile:
        """Read a profile from TOML text; ``origin`` names it in errors.

        Raises:
            FormatError: not TOML, or a key is missing, unknown, or of the wrong type or range.
        """
        return decode(cls, parse(text, origin), origin)

    def to_toml(self) -> str:
        """Return a text that :meth:`from_toml` reads back as an equal profile."""
        return encode(self)


def _named(table: dict[str, Any], stem: str) -> dict[str, Any]:
    """Add the file's stem as the name, which a user's file need not state."""
    return {"name": stem, **table}


def _require_shares(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value <= MOST_CV:
            hint = f" (a share: write {value / 100:g} for {value:g} %)" if value > MOST_CV else ""
            raise UsageError(f"{name} is {value:g}; allowed: 0 … {MOST_CV:g}{hint}")
