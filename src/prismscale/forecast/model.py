"""How a run's durations are drawn: their distribution around the step without variation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.scenario import NONE, RECORDED, WITHOUT_PROFILE
from prismscale.errors import PrismscaleError, UsageError
from prismscale.forecast.draws.fitting import FittedPool, fit_distributions
from prismscale.forecast.draws.lockstep import FusedGraph, fuse
from prismscale.forecast.draws.montecarlo import Base, DrawSource, MonteCarlo, SteadyDraws
from prismscale.forecast.draws.quotient import factors_of_sets, quotient_of
from prismscale.forecast.draws.replay import JointGroup, ReplayDraws, fit_step_regimes
from prismscale.forecast.draws.sampling import DistributionDraws, fuse_distributions
from prismscale.forecast.modelled.modelled_job import DrawnJob, Modelled, drawn_job
from prismscale.forecast.modelled.profile_draws import ProfileDraws
from prismscale.forecast.recording import Recording
from prismscale.graph.job_graph import JobGraph

ENOUGH_STEPS = 16
"""Number of recorded steps of every rank from which on they are recombined as they are. With fewer,
distributions are fitted to them."""
AHEAD_OF_FITTED = 4
"""Number of steps to draw from fitted distributions where the job must settle first."""
METHODS = ("auto", "steps", "fitted")
RUN_STEPS = 8
"""Steps that count in each drawn run of a null-device job. They are enough to tell runs from steps,
and few enough for many runs."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A graph and the distribution of its durations."""

    graph: JobGraph
    source: DistributionDraws | ReplayDraws | SteadyDraws | ProfileDraws
    step_ns: int
    """Step time without variation, as ``prismscale run`` shows it."""
    base: Base | None = None
    """Run that draws continue from. None: they begin at time 0, all ranks together."""
    steps: int | None = None
    """Number of steps to draw where the user does not say. None: see [Note: drawn steps] in
    :mod:`.draws.montecarlo`."""
    whole: DistributionDraws | None = None
    """Distributions of the graph that :attr:`graph` was fused from. None if nothing was fused."""
    fused: FusedGraph | None = None
    fitted: tuple[FittedPool, ...] = ()
    counted: int = 1
    """Number of steps that count in each draw."""
    job: DrawnJob | None = None
    """Draws of a null-device run. None for other runs."""
    notes: tuple[str, ...] = ()

    def drawn(self, config: MonteCarlo) -> MonteCarlo:
        """Return ``config`` with the number of steps that these draws need, unless it gives one."""
        if config.steps is None:
            return replace(config, steps=self.steps, counted=self.counted)
        # The first step of a run makes its ranks enter the next at different times.
        return replace(config, counted=min(self.counted, max(config.steps - 1, 1)))

    def slowed(self, factor_R: NDArray[np.float64]) -> tuple[DrawSource, Base | None]:
        """Return the draws, with a further factor on each rank's computation, and their base."""
        if self.job is not None:
            job = self.job.slowed(factor_R)
            if job is None:
                raise UsageError(
                    "ranks that are drawn as one differ in speed; give whole nodes, or --no-fuse"
                )
            return job.source, job.base
        base = None if self.base is None else self.base.slowed(factor_R)
        source = self.source
        if isinstance(source, SteadyDraws):
            return replace(source, base=source.base.slowed(factor_R)), base
        if isinstance(source, ProfileDraws):
            raise UsageError("draws of a null run are slowed with their job")
        own = factor_R if source.factor_R is None else factor_R * source.factor_R
        return replace(source, factor_R=own), base


def model_of(
    recording: Recording,
    *,
    method: str = "auto",
    fused: bool = True,
    variability: str | None = None,
) -> Model:
    """Choose how the durations of a recording are drawn.

    Args:
        method: ``steps`` recombines recorded steps; ``fitted`` fits distributions to pools;
            ``auto`` fits distributions where every rank was recorded, but in fewer than
            :data:`ENOUGH_STEPS` steps.
        fused: draw ranks that move together as one.
        variability: ``none`` holds every duration: all draws are the run's step. ``recorded``
            ignores the profile of a null-device run. None: as the recording says.

    Raises:
        UsageError: an unknown method or variability. FormatError: impossible durations.
    """
    for given, allowed in ((method, METHODS), (variability or RECORDED, WITHOUT_PROFILE)):
        if given not in allowed:
            raise UsageError(f"unknown choice '{given}'; allowed: {', '.join(allowed)}")
    if variability == NONE or recording.is_still:
        return _still(recording)
    if recording.modelled_job is not None and variability != RECORDED:
        return _profiled(recording, recording.modelled_job, fused=fused)
    few = recording.samples.n_steps < ENOUGH_STEPS and not recording.is_captured
    if method == "fitted" or (method == "auto" and few):
        return _by_distributions(recording, fused=fused)
    return _of_captured(recording, fused=fused) if recording.is_captured else _replayed(recording)


def _still(recording: Recording) -> Model:
    base = recording.base
    return Model(
        graph=recording.samples.graph,
        source=SteadyDraws(base=base),
        step_ns=base.step_ns,
        base=base,
        notes=(*recording.notes, "variation is off: every draw is the run's step"),
    )


def _profiled(recording: Recording, modelled: Modelled, *, fused: bool) -> Model:
    """Draw all ranks around the modelled durations, where all durations were modelled."""
    job = drawn_job(modelled, recording.base, fused=fused)
    name = modelled.profile.name
    notes = [f"durations are modelled, and vary as the profile '{name}' says", *recording.notes]
    if job.fused is not None:
        notes.append(
            f"sets of {job.fused.set_size} ranks that meet after every few kernels, drawn as one"
        )
    return Model(
        graph=job.source.graph,
        source=job.source,
        step_ns=recording.base.step_ns,
        base=job.base,
        counted=RUN_STEPS,
        job=job,
        notes=tuple(notes),
    )


def _assumed(recording: Recording) -> list[str]:
    """Describe how a captured job's communication varies that was not measured."""
    if not recording.is_captured or recording.cluster is None:
        return []
    varied = recording.variation
    told = (
        f"{len(recording.modelled)} communications take their time from the model of "
        f"{recording.cluster.name}"
    )
    if recording.modelled:
        told += f", varied by {varied.communication_cv:.1%} (assumed)"
        if varied.stall_probability:
            told += f", {varied.stall_probability:.2g} of them stalled"
    return [told]


def _replayed(recording: Recording) -> Model:
    """Recombine recorded steps, where every rank was recorded.

    See :mod:`.draws.replay` for what is drawn together.
    """
    samples = recording.samples
    regimes = fit_step_regimes(samples)
    count = len(np.unique(regimes.state_S))
    source = ReplayDraws(
        samples=samples,
        regime_T=regimes.state_S,
        regimes=regimes,
        factor_R=_unless_all_one(recording.base.factor_R),
        modelled=recording.modelled,
        modelled_factor=recording.variation.communication(1.0) if recording.modelled else None,
    )
    note = f"{samples.n_steps} recorded steps recombined, {count} regime(s)"
    return Model(
        graph=samples.graph,
        source=source,
        step_ns=recording.base.step_ns,
        steps=1,
        notes=(*recording.notes, note),
    )


def _of_captured(recording: Recording, *, fused: bool) -> Model:
    """Replay whole recorded steps, where a few ranks were recorded and stand for all.

    Modelled communication varies as assumed.
    """
    samples, base = recording.samples, recording.base
    nodes_of = recording.cluster.devices_per_node if recording.cluster else 1
    small = quotient_of(samples, base, nodes_of)
    source = ReplayDraws(
        samples=samples,
        together=JointGroup(job=True),
        factor_R=_unless_all_one(base.factor_R),
        modelled=recording.modelled,
        modelled_factor=recording.variation.communication(1.0) if recording.modelled else None,
        once_G=small.fused.fused_group if small else None,
    )
    notes = [*_assumed(recording), *recording.notes]
    if samples.n_steps > 1:
        notes.append(
            f"draws repeat the {samples.n_steps} captured steps; for rarer ones, run with more "
            "--samples"
        )
    if small is None or not fused:
        return Model(
            graph=samples.graph, source=source, step_ns=base.step_ns, base=base, notes=tuple(notes)
        )
    source = replace(
        source,
        samples=small.samples,
        factor_R=_unless_all_one(small.base.factor_R),
        once_G=None,
    )
    notes.append(f"sets of {small.fused.set_size} ranks that cannot differ, drawn as one")
    return Model(
        graph=small.graph,
        source=source,
        step_ns=base.step_ns,
        base=small.base,
        notes=tuple(notes),
    )


def _by_distributions(recording: Recording, *, fused: bool) -> Model:
    """Fit distributions to the pools of recorded durations, and draw each node from its own."""
    graph, steps = recording.samples.graph, recording.base.steps
    distributions, fitted = _fitted(recording)
    notes = [
        *_assumed(recording),
        *recording.notes,
        f"{len(fitted)} fitted pools",
        *distributions.notes,
    ]
    small = _lockstep(graph) if fused else None
    if small is not None and not _are_equally_fast(small, distributions):
        # Groups that run in parallel share their draws here, too: with a slow rank or without,
        # communication is drawn alike.
        distributions = replace(distributions, once_G=small.fused_group)
        notes.append("ranks of a lockstep set differ in speed: every rank drawn for itself")
        small = None
    model = Model(
        graph=graph,
        source=distributions,
        step_ns=recording.base.step_ns,
        steps=1 if steps == 1 else steps or AHEAD_OF_FITTED,
        fitted=tuple(fitted),
        notes=tuple(notes),
    )
    if small is None:
        return model
    return replace(
        model,
        graph=small.graph,
        source=fuse_distributions(small, distributions),
        whole=distributions,
        fused=small,
        notes=(*notes, f"lockstep sets of {small.set_size} ranks drawn as one"),
    )


def _fitted(recording: Recording) -> tuple[DistributionDraws, list[FittedPool]]:
    """Return fitted distributions, with the speed of ranks as recorded and as asked for."""
    distributions, fitted = fit_distributions(
        recording.samples, modelled=recording.modelled, variation=recording.variation
    )
    factor_R = _unless_all_one(recording.base.factor_R)
    if factor_R is not None:
        own = 1.0 if distributions.factor_R is None else distributions.factor_R
        distributions = replace(distributions, factor_R=factor_R * own)
    return distributions, fitted


def _lockstep(graph: JobGraph) -> FusedGraph | None:
    """Return the graph with lockstep sets fused, or None where there are none to fuse."""
    try:
        return fuse(graph)
    except PrismscaleError:
        # The sets do not fit the job's other groups.
        return None


def _are_equally_fast(fused: FusedGraph, distributions: DistributionDraws) -> bool:
    """Return whether the ranks of each lockstep set have the same spatial factor."""
    factor_R = distributions.factor_R
    return factor_R is None or factors_of_sets(fused, factor_R) is not None


def _unless_all_one(factor_R: NDArray[np.float64]) -> NDArray[np.float64] | None:
    return None if (factor_R == 1).all() else factor_R
