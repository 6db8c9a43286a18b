"""How a trace was captured, as far as later uses of the trace depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CoRunFacts:
    """Facts that need ranks which ran side by side and really communicated."""

    issue_ns: int
    """Time that issuing a communication takes from the program's thread."""
    common_jitter: float
    """Correlation of this rank's jitter with the jitter of the other ranks."""
    ranks: tuple[int, ...]
    """Ranks of the same target node that really communicated beside this one, itself included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """For a trace that holds a single step: which step of the program it was."""

    number: int
    """Number of the step, counted from 1."""
    work: str
    """Hash of the step's work. Steps that do the same have the same hash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureFacts:
    """Facts about one trace. *Calls* are calls of the optimizer."""

    device: str = ""
    torch: str = ""
    """Version of torch during capture."""
    modelled: bool = False
    """True if no duration was measured."""
    has_own_share: bool = False
    """True if a communication's duration is only this rank's share of the work, not its peers'."""
    calls: int = 0
    """Number of calls until the capture ended."""
    calls_per_step: int = 1
    calls_in_prologue: int = 0
    calls_tracked: int = 0
    """Number of calls during which memory was tracked."""
    watched_steps: int = 0
    """Number of steps that were watched for periodic events."""
    unusual_steps: int = 0
    """Number of watched steps that differed from the ordinary step."""
    step_starts: tuple[int, ...] = ()
    """Positions of step starts in the prologue, if steady steps are written out there."""
    equivalent_to: int | None = None
    """Captured rank that this rank was found to repeat, or None. The steps are that rank's."""
    pooled: tuple[int, ...] = ()
    """Ranks whose sampled steps the trace holds, in this order, with equally many steps of each."""
    longest_of: tuple[int, ...] = ()
    """Captured ranks merged here if time is modelled: each node has their longest duration."""
    co_run: CoRunFacts | None = None
    step: StepFacts | None = None

    def __post_init__(self) -> None:
        counts = {
            "calls": self.calls,
            "calls_in_prologue": self.calls_in_prologue,
            "calls_tracked": self.calls_tracked,
            "watched_steps": self.watched_steps,
            "unusual_steps": self.unusual_steps,
        }
        for name, count in counts.items():
            if count < 0:
                raise UsageError(f"{name} is {count}; it must be 0 or more")
        if self.calls_per_step < 1:
            raise UsageError(f"calls_per_step is {self.calls_per_step}; it must be 1 or more")
