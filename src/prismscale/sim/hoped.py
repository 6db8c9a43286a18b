"""Compares a job under a scenario's what-ifs with the same job without them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prismscale.durations.altered import Alteration
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.node_kernels import NodeKernels
from prismscale.durations.scenario import Scenario
from prismscale.durations.what_if.effects import Effect, Effects
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.sim.retime import retime
from prismscale.sim.settled import Extra
from prismscale.sim.shared_compute import sharing_compute
from prismscale.sim.shared_links import sharing_links


@dataclass(frozen=True, kw_only=True)
class HopedJob:
    """A run's job under a scenario, and the effect of each what-if."""

    durations: GraphDurations
    """Durations under the scenario, of the graph as the scenario changes it."""
    scenario: Scenario
    """The scenario without its what-ifs, for everything that is costed without them."""
    step_without_ns: int | None = None
    """The job's step without what-ifs; None if the scenario has none."""
    effects: tuple[Effect, ...] = ()
    """What each what-if touches."""


def hoped_job(graph: JobGraph, alteration: Alteration) -> HopedJob:
    """Return the job under the scenario of ``alteration``.

    Args:
        graph: the graph as it was captured.
        alteration: what the scenario changes in the graph.

    Raises:
        UsageError: a what-if touches nothing, needs another capture, or cannot be combined.
    """
    scenario = alteration.scenario
    if scenario.hoped.shares_compute and scenario.faults.slow:
        raise UsageError(
            "what-if 'compute=shared' with --slow: communications hold multiprocessors while they "
            "wait for slow ranks, on every rank for another time; give one of them"
        )
    if not scenario.what_ifs:
        durations = scenario.durations(alteration.graph(graph))
        return HopedJob(durations=durations, scenario=scenario)
    if scenario.faults.hang:
        # What a step takes without a what-if, and what is beside what, is that of a whole step.
        faults = replace(scenario.faults, hang={})
        whole = replace(alteration, scenario=replace(scenario, faults=faults))
        found = hoped_job(graph, whole)
        return replace(
            found,
            durations=replace(found.durations, faults=scenario.faults, sampled=False),
            scenario=replace(scenario, what_ifs=()),
        )
    durations = scenario.durations(alteration.graph(graph))
    plain = replace(alteration, scenario=replace(scenario, what_ifs=()))
    without = plain.scenario.durations(plain.graph(graph))
    step_ns = retime(without).step_ns
    effects = Effects(alteration=plain, graph=without.graph, durations=without, step_ns=step_ns)
    if scenario.hoped.shares_links:
        shared = sharing_links(without, scenario.cluster).shared_ns
        effects = replace(effects, shared_ns=shared)
        durations = sharing_links(durations, scenario.hoped.cluster(scenario.cluster))
    if scenario.hoped.shares_compute:
        beside_ns = _beside_ns(without, plain)
        effects = replace(effects, beside_ns=beside_ns)
        # Other what-ifs change what runs beside what.
        if len(scenario.what_ifs) > 1:
            beside_ns = _beside_ns(durations, alteration)
        durations = replace(durations, beside_ns=beside_ns)
    return HopedJob(
        durations=durations,
        scenario=plain.scenario,
        step_without_ns=step_ns,
        effects=tuple(effects.of(what_if) for what_if in scenario.hoped.each),
    )


def _beside_ns(durations: GraphDurations, alteration: Alteration) -> Extra:
    """Return what computation loses beside communications, at the kernel costs of a scenario."""
    kernels = NodeKernels(recosting=alteration.recosting)
    return sharing_compute(durations, alteration.scenario.cluster, kernels).beside_ns
