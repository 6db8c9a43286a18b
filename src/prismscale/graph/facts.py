"""How a trace came to be, as far as what is made of it depends on that."""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CoRunFacts:
    """What only ranks that ran side by side, and really communicated, can tell."""

    issue_ns: int
    """What issuing a communication takes."""
    common_jitter: float
    """Correlation of this rank's jitter with that of the others."""
    ranks: tuple[int, ...]
    """Ranks on this rank's node that really communicated beside it, itself among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """Of a trace that is one step: which step of the program it was."""

    number: int
    """From 1."""
    work: str
    """Equal for steps that do the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureFacts:
    """Facts about one trace. *Calls* are calls of the optimizer."""

    device: str = ""
    torch: str = ""
    """Version of torch."""
    modelled: bool = False
    """No duration was measured."""
    has_own_share: bool = False
    """A communication's duration is this rank's part of the work, without its peers'."""
    calls: int = 0
    """Calls until the capture ended."""
    calls_per_step: int = 1
    calls_in_prologue: int = 0
    calls_tracked: int = 0
    """Calls while memory was followed."""
    watched_steps: int = 0
    """Steps that were watched for periodic events."""
    unusual_steps: int = 0
    """How many of the watched steps had one."""
    step_starts: tuple[int, ...] = ()
    """Positions in the prologue at which steps begin, where it holds steady steps written out."""
    equivalent_to: int | None = None
    """The captured rank that this one was found to repeat; None: none. Its steps are these."""
    pooled: tuple[int, ...] = ()
    """Ranks whose sampled steps the trace holds, in this order, equally many of each."""
    longest_of: tuple[int, ...] = ()
    """Where time is modelled, captured ranks: each node has the longest of their durations."""
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
