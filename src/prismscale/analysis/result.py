"""The result of one run, as ``results.json`` holds it. ``docs/results.md`` has the schema."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from prismscale.analysis.attribution import Breakdown
from prismscale.analysis.emulated import (
    EagerRegion,
    KernelKind,
    KernelUse,
    StandInShare,
    UnknownOperator,
    ValueUse,
    coverage,
)
from prismscale.analysis.job_work import JobWork
from prismscale.analysis.moved import Moved
from prismscale.analysis.overload import RouterFindings
from prismscale.analysis.payload_use import PayloadKind, PayloadUse
from prismscale.analysis.switched import SwitchCounts
from prismscale.analysis.wanted import Wanted
from prismscale.cluster import Calibration
from prismscale.durations.source import NEVER
from prismscale.durations.what_if.effects import Effect
from prismscale.errors import FormatError
from prismscale.graph.trace import MemoryPart
from prismscale.typed_files import decode

SCHEMA = "prismscale.results/1"
NOT_OURS = ("schema", "forecast", "answers")
"""Keys of ``results.json`` that are not fields of :class:`RunResult`. Forecast commands add
``forecast``; ``answers`` are derived from the other keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """Figures of one pipeline stage, or of all ranks where there is no pipeline."""

    name: str
    ranks: int
    first_rank: int
    breakdown: Breakdown
    memory_source: str
    peak_bytes: int | None = None
    """Most bytes that tensors hold, on the captured rank whose GPU is fullest. None where memory
    was not tracked."""
    reserved_bytes: int | None = None
    """Most bytes that torch's allocator holds on that GPU. None where memory was not tracked or
    there is no such allocator."""
    outside: tuple[MemoryPart, ...] = ()
    """Memory on that GPU outside torch's allocator, where it is modelled; largest first."""
    fullest_rank: int | None = None
    """The captured rank whose GPU is fullest; None where memory was not tracked."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of all parts of :attr:`outside`."""
        return sum(part.n_bytes for part in self.outside)

    @property
    def held_bytes(self) -> int:
        """Reserved bytes and those outside torch's allocator, on the fullest GPU."""
        return (self.reserved_bytes or 0) + self.outside_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassResult:
    """One rank class: its size, its captured members, and how many members are assumed alike."""

    index: int
    stage: str
    ranks: int
    captured: tuple[int, ...]
    assumed: int
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveResult:
    """Observations of one live rank."""

    rank: int
    step_ns: tuple[int, ...]
    """Step times on the logical clock, in order."""
    median_step_ns: int
    predicted_step_ns: int
    """Median step of the same rank when the job is re-timed with the captured steps."""
    waited_ns: int
    """Median time per step spent waiting for communication."""
    lag_ns: int
    """Median cost of emulation per step, taken out of ``step_ns``."""
    peak_bytes: int
    """0 where memory was not tracked."""
    boot_s: float
    communications: int
    uncovered: int
    moved: Moved = field(default_factory=Moved)
    """Messages and bytes that the rank really sent and received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """Share of the step whose time comes from one source of durations."""

    source: str
    share: float
    """Fraction of the step's time on the ranks shown, 0 … 1."""
    error: str
    """The known error of this source, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventResult:
    """A periodic event, which occurs only in some steps: logging, evaluation, a checkpoint."""

    first: int
    """Number of the step, from 1, in which it was first seen. Work after the optimizer call of one
    step belongs to the next step."""
    every: int
    """Steps from one occurrence to the next; 0 if it occurred once."""
    seen: int
    """How often it was seen. ``every`` is assumed for an event that was seen once."""
    extra_ns: int
    """Time that one occurrence adds to the job's steps."""
    share: float
    """Fraction of the training time that it takes, 0 … 1."""
    site: str
    """The line of the program from which it communicates; empty where it does not."""
    checkpoint_bytes: int = 0
    """Most checkpoint bytes that a captured rank writes in it on a null device."""

    @property
    def is_notable(self) -> bool:
        """Whether it takes training time or occurred once.

        Other events cost nothing, or always occur together with another event.
        """
        return bool(self.share) or not self.every


@dataclass(frozen=True, kw_only=True, slots=True)
class StandstillResult:
    """Which ranks caused a hang, and with which call."""

    cause: str
    """The value of a :class:`prismscale.diagnosis.finding.Cause`."""
    culprits: tuple[int, ...]
    site: str
    """The line of the call that is missing, added, or different from that of similar ranks."""
    text: str
    """A few lines for the user."""
    folder: str
    """Folder with a flight record of each rank, in torch's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpread:
    """Distribution of the step time, as ``prismscale forecast`` draws it."""

    p50_ns: int
    p95_ns: int
    mean_ns: int
    draws: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """All figures of one run."""

    command: str
    world_size: int
    cluster: str
    device: str
    step_ns: int
    """Steady step time of the job, with captured variation only. The parts of the step add up to
    it. :data:`NEVER` where the job hangs. The cluster would show :attr:`median_ns`."""
    step_spread_ns: tuple[int, int]
    """Shortest and longest of the simulated steps whose median is :attr:`step_ns`."""
    sampled_steps: int
    """Number of those steps. Each takes the durations of a different captured step. 1 where
    captured steps do not differ: simulated steps are then equal once the job has settled."""
    stages: tuple[StageResult, ...]
    classes: tuple[ClassResult, ...]
    live: tuple[LiveResult, ...]
    sources: tuple[SourceShare, ...]
    distinct_axes: tuple[str, ...]
    witnesses: tuple[int, ...]
    captured: tuple[int, ...]
    samples: int
    """Smallest number of measured steps of any captured rank."""
    hangs: tuple[str, ...]
    rank_nodes: int
    checked: tuple[int, ...] = ()
    """Ranks besides the captured ones whose first steps were compared (``--check``)."""
    standstill: StandstillResult | None = None
    """The cause of a hang; None where the job does not hang."""
    events: tuple[EventResult, ...] = ()
    """Periodic events, in the order in which they were seen."""
    unmatched_events: tuple[str, ...] = ()
    """For each periodic event whose ranks do not fit together, the reason. No figure has them."""
    watched_steps: int = 0
    """Most steps of the program that were watched on any captured rank."""
    settled_after: int = 0
    """Simulated steps until the job settled; 0 where captured steps differ or it did not settle."""
    kernels: tuple[KernelKind, ...] = ()
    """On a null device: kernels in one step of every captured rank, longest first."""
    largest_kernels: tuple[KernelUse, ...] = ()
    """On a null device: the distinct calls that take the most device time."""
    unknown_operators: tuple[UnknownOperator, ...] = ()
    """On a null device: operators without a cost rule, longest first."""
    stand_ins: tuple[StandInShare, ...] = ()
    """On a null device: libraries whose kernels a stand-in launched, in order of import."""
    eager_regions: tuple[EagerRegion, ...] = ()
    """On a null device: regions that the program compiles and that ran operator by operator, most
    frequent first."""
    values: tuple[ValueUse, ...] = ()
    """On a null device: reads of values that do not exist, most frequent first."""
    switched: SwitchCounts | None = None
    """How ranks shared slots and memory; None unless the run used real values."""
    what_ifs: tuple[Effect, ...] = ()
    """The what-ifs of the run, with what each touches. All figures except those of kernels include
    them."""
    step_without_ns: int | None = None
    """The step without what-ifs; None where there are none."""
    payload: PayloadKind = PayloadKind.RECORDED
    """The first source that was asked for the contributions of absent peers."""
    payloads: tuple[PayloadUse, ...] = ()
    """Sources of absent peers' contributions to captured and live ranks, with counts."""
    routers: RouterFindings = field(default_factory=RouterFindings)
    """How unevenly experts are loaded, and where ``--routing`` overwrote scores."""
    variability: str = ""
    """Name of the variability profile that forecasts of this run use; empty for none."""
    spread: StepSpread | None = None
    """Distribution of the step time; None where the job hangs or no steps were drawn."""
    work: JobWork = field(default_factory=JobWork)
    """On a null device: floating-point operations and tokens of a step."""
    calibration: Calibration | None = None
    """Correction of modelled times by measured steps; None where the models' times are used."""
    capacity_bytes: int = 0
    """Memory of the target's GPU; 0 where the target is no GPU."""
    peak_flops: float = 0.0
    """Peak operations per second of the target's device in ``work.dtype``; 0 where unknown."""
    wanted: Wanted = field(default_factory=Wanted)
    """What the user asked of the answers."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage of the run."""
    peak_rss_bytes: int = 0
    """Highest resident memory of all processes of the run together, as sampled."""

    @property
    def fullest(self) -> StageResult | None:
        """The stage with the fullest GPU; None where memory was not tracked."""
        followed = (s for s in self.stages if s.peak_bytes is not None)
        return max(followed, key=lambda s: (s.held_bytes, s.peak_bytes or 0), default=None)

    @property
    def notable_events(self) -> tuple[EventResult, ...]:
        """The events that reports show."""
        return tuple(event for event in self.events if event.is_notable)

    @property
    def varies(self) -> bool:
        """Whether simulated steps differ because captured steps did."""
        return self.sampled_steps > 1

    @property
    def median_ns(self) -> int:
        """The step that a job's log would show: the median of drawn steps, else :attr:`step_ns`."""
        return self.spread.p50_ns if self.spread else self.step_ns

    @property
    def hung(self) -> bool:
        """Whether some rank never ends the last simulated step."""
        return self.step_ns >= NEVER

    @property
    def kernel_coverage(self) -> float:
        """Fraction of kernel time whose cost is not a default, 0 … 1."""
        return coverage(self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``results.json``."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any, origin: str = "results") -> RunResult:
        """Read what :meth:`to_json` wrote; ``origin`` names the file in errors.

        Raises:
            FormatError: another schema, or a field that is missing, unknown or of the wrong type.
        """
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise FormatError(f"{origin}: schema is {schema!r}; this version reads {SCHEMA!r}")
        ours = {k: v for k, v in data.items() if k not in NOT_OURS}
        return decode(cls, ours, origin)
