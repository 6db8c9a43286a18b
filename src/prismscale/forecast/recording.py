"""Input of a forecast: a captured or imported run, as ``prismscale run`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from prismscale.cluster import Cluster
from prismscale.durations.altered import Alteration
from prismscale.durations.composition import compositions
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import has_samples, load_samples
from prismscale.durations.scenario import NONE, WITHOUT_PROFILE, Scenario, check_compute_scale
from prismscale.durations.source import LaterDurations, scaled
from prismscale.durations.stored_events import load_events
from prismscale.durations.what_if.effects import Effect
from prismscale.durations.what_if.recorded_steps import (
    hoped_samples,
    import_effects,
    import_scenario,
)
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.draws.montecarlo import Base
from prismscale.forecast.draws.variation import Variation
from prismscale.forecast.modelled.modelled_job import Modelled
from prismscale.graph.io import GRAPH_FILE, load_graph
from prismscale.runfolder import RunFolder
from prismscale.sim.event_cost import EventCost, event_costs
from prismscale.sim.hoped import hoped_job
from prismscale.sim.program import compile_job
from prismscale.sim.retime import STEPS, retime
from prismscale.sim.timeline import simulate


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to the run's own scenario. None: the scenario's value stays."""

    cluster: str | None = None
    compute_scale: float | None = None
    slow: Mapping[int, float] | None = None
    kernels: str | None = None
    """File of measured kernel times, for a null-device run."""
    what_ifs: tuple[str, ...] | None = None
    """See :mod:`prismscale.durations.what_if.forms`."""
    variability: str | None = None
    """``none``, ``recorded``, or a variability profile for a null-device run. A profile is a
    preset's name or a TOML file."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run's recorded steps, with a duration for every node, and its step without variation."""

    samples: StepSamples
    base: Base
    is_captured: bool = False
    """Whether a few ranks were recorded and stand for all. False: every rank was recorded."""
    modelled: frozenset[tuple[int, int]] = frozenset()
    """(class, body node) pairs of communication whose duration comes from a model."""
    variation: Variation = field(default_factory=Variation)
    """How much modelled communication varies."""
    cluster: Cluster | None = None
    """Cluster that the run is timed on. None: the import does not say."""
    events: tuple[EventCost, ...] = ()
    """Events that happen only in some steps, with their cost."""
    effects: tuple[Effect, ...] = ()
    """What each what-if touches."""
    modelled_job: Modelled | None = None
    """Variability of a null-device run. None: durations vary as recorded."""
    is_still: bool = False
    """Whether the user asked for no variation."""
    notes: tuple[str, ...] = ()
    """Where durations come from, for the user."""


def load_recording(
    folder: Path,
    cluster: str | None = None,
    variation: Variation | None = None,
    changes: Changes | None = None,
) -> Recording:
    """Read the run in a folder, with the scenario that it was made with, except for ``changes``.

    Args:
        folder: a run folder, or the folder of a graph itself.
        cluster: preset or TOML file in place of the run's own; needed for a graph without a run
            where communication was not measured.
        variation: how much communication varies that was not measured; None: the default.

    Raises:
        UsageError: there is no graph, no cluster was given where one is needed, or a change cannot
            be made without running the program again.
        FormatError: the files are damaged, or of an older version.
    """
    changes = changes or Changes(cluster=cluster)
    found = _read(folder, variation, changes)
    return replace(found, is_still=changes.variability == NONE)


def _read(folder: Path, variation: Variation | None, changes: Changes) -> Recording:
    run = RunFolder(root=folder)
    graph_folder = run.graph if run.graph.is_dir() else folder
    if not (graph_folder / GRAPH_FILE).is_file():
        raise UsageError(
            f"{folder} holds no run: make one with prismscale run --out {folder}, or import one"
        )
    if has_samples(graph_folder):
        found = recording_of_import(load_samples(graph_folder), changes)
        if variation is not None and found.modelled:
            return replace(found, variation=variation)
        return found
    graph = load_graph(graph_folder)
    own, scenario = _scenarios(run, changes)
    if scenario.faults.hang:
        raise UsageError(f"{folder}: the job hangs, so it has no steps; run it without --hang")
    alteration = Alteration(scenario=scenario, root=run.root, stored=own)
    job = hoped_job(graph, alteration)
    found = _profiled(recording_of(job.durations, scenario, variation), alteration)
    found = replace(
        found,
        effects=job.effects,
        notes=(*found.notes, *(effect.sentence() for effect in job.effects)),
    )
    if not scenario.costs_kernels_as(own):
        note = "kernels costed anew; what happens only in some steps is not in the days of training"
        return replace(found, notes=(*found.notes, note))
    without_ns = found.base.step_ns if job.step_without_ns is None else job.step_without_ns
    events = event_costs(load_events(run.periodic), job.scenario, without_ns)
    return replace(found, events=tuple(events))


def _profiled(found: Recording, alteration: Alteration) -> Recording:
    """Return the recording with the variability of the scenario's profile, if it has one."""
    scenario = alteration.scenario
    profile = scenario.variability
    if profile is None or scenario.kernel_costs is None:
        return found
    modelled = Modelled(
        profile=profile,
        compositions=compositions(found.samples.graph, alteration.recosting),
        devices_per_node=scenario.cluster.devices_per_node,
        nodes_per_domain=scenario.cluster.nodes_per_nvlink_domain,
        links_of=scenario.hoped.links_of(found.samples.graph, scenario.cluster),
    )
    return replace(found, modelled_job=modelled)


def _scenarios(run: RunFolder, changes: Changes) -> tuple[Scenario, Scenario]:
    """Return the run's own scenario, and the same with the changes."""
    slow, scale, kernels = changes.slow, changes.compute_scale, changes.kernels
    what_ifs = changes.what_ifs
    if run.scenario.is_file():
        own = Scenario.load(run.scenario)
        return own, own.changed(
            cluster=changes.cluster,
            compute_scale=scale,
            slow=slow,
            kernels=kernels,
            what_ifs=what_ifs,
            variability=changes.variability,
        )
    if run.results.is_file() and run.timeline.is_file():
        raise FormatError(
            f"{run.root} was made by an older version, which did not say with which faults and on "
            "which cluster; run the program again: captures are reused"
        )
    if changes.cluster is None:
        raise UsageError(
            f"{run.root} does not say on which cluster it runs; name the one whose model is to "
            "answer for its communication (--cluster h100-sxm)"
        )
    own = Scenario(cluster=Cluster.load(changes.cluster))
    return own, own.changed(
        compute_scale=scale,
        slow=slow,
        kernels=kernels,
        what_ifs=what_ifs,
        variability=changes.variability,
    )


def recording_of(
    durations: GraphDurations, scenario: Scenario, variation: Variation | None = None
) -> Recording:
    """Return the recording of a captured job with the durations of its scenario."""
    retimed = retime(durations)
    even = replace(durations, faults=Faults())
    base = Base(
        graph=durations.graph,
        plain=LaterDurations(durations=even, first=retimed.first_row),
        factor_R=durations.faults.factors(durations.graph.world_size),
        step_ns=retimed.step_ns,
        steps=None if retimed.steady is not None else STEPS,
    )
    return Recording(
        samples=durations.samples(),
        base=base,
        is_captured=True,
        modelled=_modelled(durations),
        variation=variation or Variation(),
        cluster=scenario.cluster,
    )


def _modelled(durations: GraphDurations) -> frozenset[tuple[int, int]]:
    return frozenset(
        (c.index, node - c.trace.n_prologue)
        for c in durations.graph.classes
        for node in c.trace.communications(c.trace.n_prologue, c.trace.n_nodes)
        if durations.is_modelled(c.index, node - c.trace.n_prologue)
    )


def recording_of_import(samples: StepSamples, changes: Changes) -> Recording:
    """Return the recording of an import.

    Each recorded step is re-timed alone, from a moment at which all ranks begin it. The median step
    is the run's step.
    """
    if changes.kernels is not None:
        raise UsageError("--kernels models a null device's kernels; this is an import")
    if changes.variability not in (None, *WITHOUT_PROFILE):
        raise UsageError(
            f"--variability {changes.variability}: an import was measured; allowed are "
            f"{', '.join(WITHOUT_PROFILE)}"
        )
    if changes.what_ifs:
        return _hoped_import(samples, changes)
    return _recording_of_import(samples, changes, import_scenario(changes.cluster, ()))


def _hoped_import(samples: StepSamples, changes: Changes) -> Recording:
    scenario = import_scenario(changes.cluster, changes.what_ifs or ())
    # Called first, because it refuses what an import cannot answer at all.
    hoped = hoped_samples(samples, scenario)
    without = recording_of_import(samples, replace(changes, what_ifs=None)).base
    effects = import_effects(samples, scenario, without.durations, without.step_ns)
    found = _recording_of_import(hoped, changes, scenario)
    notes = (*found.notes, *(effect.sentence() for effect in effects))
    return replace(found, effects=effects, notes=notes)


def _recording_of_import(samples: StepSamples, changes: Changes, scenario: Scenario) -> Recording:
    missing: frozenset[tuple[int, int]] = frozenset()
    if changes.cluster is not None:
        missing = _unmeasured(samples)
        samples = _filled(samples, missing, scenario)
    if changes.compute_scale is not None:
        check_compute_scale(changes.compute_scale)
        samples = _rescaled(samples, changes.compute_scale)
    faults = Faults(slow=changes.slow or {})
    faults.check(samples.graph.world_size)
    factor_R = faults.factors(samples.graph.world_size)
    bases = [
        Base(
            graph=samples.graph,
            plain=samples.durations(t),
            factor_R=factor_R,
            step_ns=0,
            steps=1,
        )
        for t in range(samples.n_steps)
    ]
    program = compile_job(samples.graph)
    step_ns_T = [
        simulate(samples.graph, b.durations, steps=1, program=program).step_ns for b in bases
    ]
    middle = int(np.argsort(step_ns_T, kind="stable")[(samples.n_steps - 1) // 2])
    base = replace(bases[middle], step_ns=step_ns_T[middle])
    cluster = scenario.cluster if changes.cluster else None
    return Recording(samples=samples, base=base, modelled=missing, cluster=cluster)


def _unmeasured(samples: StepSamples) -> frozenset[tuple[int, int]]:
    """Return (class, body node) of communication without recorded time, zero bytes included."""
    found = frozenset(
        (rank_class.index, node)
        for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True)
        for node, computes in enumerate(rank_class.trace.computes_B.tolist())
        if not computes and not own.body_ns[node].any()
    )
    if not found:
        raise UsageError(
            "--cluster: all communication of this import was measured; nothing is left to a model"
        )
    return found


def _filled(
    samples: StepSamples, missing: frozenset[tuple[int, int]], scenario: Scenario
) -> StepSamples:
    """Return the samples with modelled durations for the communication in ``missing``."""
    durations = scenario.durations(samples.graph)
    classes = list(samples.classes)
    for class_index, node in missing:
        own = classes[class_index]
        trace = samples.graph.classes[class_index].trace
        modelled = durations.communication_ns(class_index, trace.n_prologue + node)
        body = list(own.body_ns)
        body[node] = np.broadcast_to(modelled, (samples.n_steps, len(modelled)))
        classes[class_index] = replace(own, body_ns=tuple(body))
    return replace(samples, classes=tuple(classes))


def _rescaled(samples: StepSamples, factor: float) -> StepSamples:
    """Return the samples with their computation multiplied by a factor."""
    classes = []
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        computes = rank_class.trace.computes_B.tolist()
        body = (
            scaled(ns, factor) if c else ns for ns, c in zip(own.body_ns, computes, strict=True)
        )
        classes.append(replace(own, body_ns=tuple(body)))
    return replace(samples, classes=tuple(classes), observed_step_ns_T=None)
