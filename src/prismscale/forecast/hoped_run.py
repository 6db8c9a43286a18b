"""A stored run compared with its what-ifs: steps, where their time goes, and how they vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from prismscale.analysis.attribution import Breakdown, break_down
from prismscale.analysis.stages import classes_by_stage, stage_name
from prismscale.durations.what_if.effects import Effect
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.montecarlo import Base, MonteCarlo, draw_steps
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import Changes, Recording
from prismscale.progress import StageUpdate
from prismscale.sim.timeline import Timeline, simulate, simulate_steady

QUANTILES = (0.5, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class HopedStage:
    """Where the step of a pipeline stage goes, or of all ranks where there is no pipeline."""

    name: str
    ranks: int
    breakdown: Breakdown
    """Breakdown of the stage's first rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A job, as it is or with its what-ifs."""

    step_ns: int
    """Step time without variation."""
    stages: tuple[HopedStage, ...]
    quantile_ns: Mapping[float, float]
    """Quantiles of the drawn steps."""
    notes: tuple[str, ...]

    @property
    def exposed_ns(self) -> float:
        """Communication that nothing hides, on average over ranks."""
        ranks = sum(stage.ranks for stage in self.stages)
        return sum(s.ranks * s.breakdown.total_exposed_ns for s in self.stages) / ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class HopedRun:
    """A run as it is, and with what-ifs."""

    before: Side
    after: Side
    effects: tuple[Effect, ...]
    alone_ns: tuple[int, ...]
    """Step time with each what-if alone, in the order of the what-ifs."""


@dataclass(frozen=True, kw_only=True)
class HopedRuns:
    """Evaluates what-ifs on one run."""

    load: Callable[[Changes], Recording]
    """Reads the run with some changes."""
    changes: Changes
    """Changes that both sides have."""
    config: MonteCarlo
    method: str = "auto"
    executor: Executor | None = None

    def compare(self, what_ifs: Sequence[str], update: StageUpdate | None = None) -> HopedRun:
        """Compare the run without any what-if and the run with these.

        Raises:
            UsageError: none is given, one touches nothing, or one needs another capture.
        """
        if not what_ifs:
            raise UsageError(
                "no what-if is given; give one, for example 'kernel=attention.* x0.5', or several"
            )
        # Loaded first, so that a wrong what-if is reported before anything is drawn.
        hoped = self._recording(what_ifs)
        alone = [hoped] if len(what_ifs) == 1 else [self._recording([w]) for w in what_ifs]
        sides = []
        for done, recording in enumerate((self._recording(()), hoped)):
            sides.append(self._side(recording))
            if update is not None:
                update(done + 1, 2)
        return HopedRun(
            before=sides[0],
            after=sides[1],
            effects=hoped.effects,
            alone_ns=tuple(recording.base.step_ns for recording in alone),
        )

    def _recording(self, what_ifs: Sequence[str]) -> Recording:
        return self.load(replace(self.changes, what_ifs=tuple(what_ifs)))

    def _side(self, recording: Recording) -> Side:
        model = model_of(recording, method=self.method)
        # The same seed on both sides, so that differences are not chance.
        config = model.drawn(self.config)
        drawn = draw_steps(
            model.graph, model.source, config, base=model.base, executor=self.executor
        )
        return Side(
            step_ns=model.step_ns,
            stages=stages_of(recording.base),
            quantile_ns={q: drawn.quantile_ns(q) for q in QUANTILES},
            notes=model.notes,
        )


def stages_of(base: Base) -> tuple[HopedStage, ...]:
    """Return where the step without variation goes, by pipeline stage."""
    stages = classes_by_stage(base.graph)
    first = {stage: int(min(c.members_M[0] for c in own)) for stage, own in stages.items()}
    timeline = _timeline(base, sorted(first.values()))
    return tuple(
        HopedStage(
            name=stage_name(stage),
            ranks=sum(c.size for c in own),
            breakdown=break_down(timeline, first[stage]),
        )
        for stage, own in stages.items()
    )


def _timeline(base: Base, ranks: Sequence[int]) -> Timeline:
    if base.steps is None:
        return simulate_steady(base.graph, base.durations, ranks=ranks)[0]
    return simulate(base.graph, base.durations, steps=base.steps, ranks=ranks)
