"""The outcome of one run: what ``results.json`` holds. The schema is in ``docs/results.md``."""

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
from prismscale.cluster import Calibration
from prismscale.durations.source import NEVER
from prismscale.durations.what_if.effects import Effect
from prismscale.errors import FormatError
from prismscale.graph.trace import MemoryPart
from prismscale.typed_files import decode

SCHEMA = "prismscale.results/1"
NOT_OURS = ("schema", "forecast", "answers")
"""Members that are no part of a run's own outcome: the forecast commands add theirs, and answers
are made of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One pipeline stage, or all ranks where there is no pipeline."""

    name: str
    ranks: int
    first_rank: int
    breakdown: Breakdown
    memory_source: str
    peak_bytes: int | None = None
    """Highest peak of the captured ranks; None where memory was not tracked."""
    reserved_bytes: int | None = None
    """What torch's allocator holds at most, on the captured rank whose GPU is fullest; None where
    it was not tracked, or there is none."""
    outside: tuple[MemoryPart, ...] = ()
    """What others hold on that GPU, where it is modelled; largest first."""
    fullest_rank: int | None = None
    """The captured rank whose GPU is fullest; None where memory was not tracked."""

    @property
    def outside_bytes(self) -> int:
        """Of all parts."""
        return sum(part.n_bytes for part in self.outside)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassResult:
    """One rank class: who is in it, and what was checked."""

    index: int
    stage: str
    ranks: int
    captured: tuple[int, ...]
    assumed: int
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveResult:
    """What was observed of one live rank."""

    rank: int
    step_ns: tuple[int, ...]
    """Logical step times, in order."""
    median_step_ns: int
    predicted_step_ns: int
    """Median of the same rank's steps when the job is re-timed with captured ones."""
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
    """What it really sent and received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """How much of the step rests on one source of durations."""

    source: str
    share: float
    """Fraction of the step's time on the ranks shown, 0 … 1."""
    error: str
    """What is known about this source's error, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventResult:
    """What happens only in some steps: logging, evaluation, a checkpoint."""

    first: int
    """Number of the step, from 1, in which it was first seen. What a program does after the
    optimizer of one step lies in the next."""
    every: int
    """Steps from one to the next; 0: it came once."""
    seen: int
    """How often it was seen; of an event seen once, ``every`` is assumed."""
    extra_ns: int
    """Time that one of them adds to the job's steps."""
    share: float
    """Of the time of training, 0 … 1."""
    site: str
    """The line of the program from which it communicates; empty where it does not."""
    checkpoint_bytes: int = 0
    """What a captured rank of a null device writes of a checkpoint in it, at most."""

    @property
    def is_notable(self) -> bool:
        """Whether training takes any time for it, or it came once. Others cost nothing, or come
        with another whenever they come."""
        return bool(self.share) or not self.every


@dataclass(frozen=True, kw_only=True, slots=True)
class StandstillResult:
    """Who began that a job stands still."""

    cause: str
    """In a few words, as :class:`prismscale.diagnosis.finding.Cause` has them."""
    culprits: tuple[int, ...]
    site: str
    """The line of the call that is missing, added, or other than its likes'."""
    text: str
    """Some lines for people."""
    folder: str
    """Takes a flight record of each rank, as torch writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpread:
    """How the step varies, as ``prismscale forecast`` draws it."""

    p50_ns: int
    p95_ns: int
    mean_ns: int
    draws: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Everything one run found out."""

    command: str
    world_size: int
    cluster: str
    device: str
    step_ns: int
    """Steady step of the job, with the variation that was captured and no other: what its parts add
    up to. :data:`NEVER` where it hangs. The cluster would show :attr:`median_ns`."""
    step_spread_ns: tuple[int, int]
    """Shortest and longest of the simulated steps that :attr:`step_ns` is the median of."""
    sampled_steps: int
    """How many steps that is, each with the durations of other captured steps; 1 where those do not
    differ, and simulated steps are equal once the job has settled."""
    stages: tuple[StageResult, ...]
    classes: tuple[ClassResult, ...]
    live: tuple[LiveResult, ...]
    sources: tuple[SourceShare, ...]
    distinct_axes: tuple[str, ...]
    witnesses: tuple[int, ...]
    captured: tuple[int, ...]
    samples: int
    """Fewest steps that were measured of any captured rank."""
    hangs: tuple[str, ...]
    rank_nodes: int
    checked: tuple[int, ...] = ()
    """Ranks whose first steps were looked at besides the captured ones."""
    standstill: StandstillResult | None = None
    """Of a job that hangs."""
    events: tuple[EventResult, ...] = ()
    """What happens only in some steps, in the order in which it was seen."""
    unmatched_events: tuple[str, ...] = ()
    """Why what some ranks did in some steps could not be put together."""
    watched_steps: int = 0
    """Steps of the program that were seen of the first captured rank."""
    settled_after: int = 0
    """Simulated steps until the job had settled; 0 where captured steps differ, or it had not."""
    kernels: tuple[KernelKind, ...] = ()
    """On a null device: kernels in a step of the captured ranks, longest first."""
    largest_kernels: tuple[KernelUse, ...] = ()
    """On a null device: the distinct calls that take the most of it."""
    unknown_operators: tuple[UnknownOperator, ...] = ()
    """On a null device: operators without a rule of cost, longest first."""
    stand_ins: tuple[StandInShare, ...] = ()
    """On a null device: libraries whose kernels a stand-in launched, in the order of import."""
    eager_regions: tuple[EagerRegion, ...] = ()
    """On a null device: what the program compiles and ran operator by operator, most frequent
    first."""
    values: tuple[ValueUse, ...] = ()
    """On a null device: reads of values that do not exist, most frequent first."""
    switched: SwitchCounts | None = None
    """With real values, how the ranks ran."""
    what_ifs: tuple[Effect, ...] = ()
    """What was taken to be otherwise, with what it touches; all figures but those of kernels are
    with it."""
    step_without_ns: int | None = None
    """The step without what-ifs; None where there are none."""
    payload: PayloadKind = PayloadKind.RECORDED
    """The first source that was asked for what absent peers contribute."""
    payloads: tuple[PayloadUse, ...] = ()
    """From where captured and live ranks had what absent peers contribute, and how often."""
    routers: RouterFindings = field(default_factory=RouterFindings)
    """How unevenly experts are loaded, and whether by the user's word."""
    variability: str = ""
    """Name of the variability profile that forecasts of this run take; empty for none."""
    spread: StepSpread | None = None
    """None where the job hangs, or where nobody drew it."""
    work: JobWork = field(default_factory=JobWork)
    """On a null device: operations and tokens of a step."""
    calibration: Calibration | None = None
    """What measured steps say of modelled times; None: modelled times are the models'."""
    capacity_bytes: int = 0
    """Memory of the target's GPU; 0 where the target is no GPU."""
    peak_flops: float = 0.0
    """What the target's device does a second of :attr:`work`'s element type; 0 where unknown."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """By stage of the run."""
    peak_rss_bytes: int = 0
    """Highest memory of all our processes together, as sampled."""

    @property
    def notable_events(self) -> tuple[EventResult, ...]:
        """Those of :attr:`events` that a reader is shown."""
        return tuple(event for event in self.events if event.is_notable)

    @property
    def varies(self) -> bool:
        """Whether simulated steps differ because captured ones did."""
        return self.sampled_steps > 1

    @property
    def median_ns(self) -> int:
        """The step that a log of the job would show: the median of drawn ones. Where nobody drew,
        :attr:`step_ns`."""
        return self.spread.p50_ns if self.spread else self.step_ns

    @property
    def hung(self) -> bool:
        """True where some rank never ends the last simulated step."""
        return self.step_ns >= NEVER

    @property
    def kernel_coverage(self) -> float:
        """Share of the kernels' time whose cost is not a default, 0 … 1."""
        return coverage(self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``results.json``."""
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
