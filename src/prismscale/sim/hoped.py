"""A job with its what-ifs, beside the same job without them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prismscale.durations.altered import Alteration
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.scenario import Scenario
from prismscale.durations.what_if.effects import Effect, Effects
from prismscale.graph.job_graph import JobGraph
from prismscale.sim.retime import retime
from prismscale.sim.shared_links import sharing_links


@dataclass(frozen=True, kw_only=True)
class HopedJob:
    """What a scenario makes of a run's graph."""

    durations: GraphDurations
    """As the scenario has it, of the graph that it leaves."""
    scenario: Scenario
    """That the graph was made for, without its what-ifs: what is costed without them."""
    step_without_ns: int | None = None
    """The job's step without its what-ifs; None where there are none."""
    effects: tuple[Effect, ...] = ()
    """What each what-if touches."""


def hoped_job(graph: JobGraph, alteration: Alteration) -> HopedJob:
    """The job as the scenario of ``alteration`` has it.

    Args:
        graph: as it was captured.
        alteration: what the scenario changes in it.

    Raises:
        UsageError: a what-if that touches nothing, or needs another capture.
    """
    scenario = alteration.scenario
    durations = scenario.durations(alteration.graph(graph))
    if not scenario.what_ifs:
        return HopedJob(durations=durations, scenario=scenario)
    plain = replace(alteration, scenario=replace(scenario, what_ifs=()))
    without = plain.scenario.durations(plain.graph(graph))
    step_ns = retime(without).step_ns
    effects = Effects(alteration=plain, graph=without.graph, durations=without, step_ns=step_ns)
    if scenario.hoped.shares_links:
        shared = sharing_links(without, scenario.cluster).shared_ns
        effects = replace(effects, shared_ns=shared)
        durations = sharing_links(durations, scenario.hoped.cluster(scenario.cluster))
    return HopedJob(
        durations=durations,
        scenario=plain.scenario,
        step_without_ns=step_ns,
        effects=tuple(effects.of(what_if) for what_if in scenario.hoped.each),
    )
