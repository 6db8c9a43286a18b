"""What-ifs on an import, a job whose steps were recorded elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from prismscale.cluster import Cluster
from prismscale.durations.altered import Alteration
from prismscale.durations.samples import ClassSamples, StepSamples
from prismscale.durations.scenario import Scenario
from prismscale.durations.source import DurationSource, scaled
from prismscale.durations.what_if.effects import Effect, Effects
from prismscale.durations.what_if.forms import ComputeShared, GroupOn, LinkSpeed, LinksShared
from prismscale.errors import UsageError
from prismscale.graph.job_graph import RankClass

ANY_CLUSTER = "h100-sxm"
"""Cluster of an import's scenario where no duration depends on it."""


def import_scenario(cluster: str | None, what_ifs: Sequence[str]) -> Scenario:
    """Make the scenario with which an import is timed.

    Args:
        cluster: its model answers for communication that was not measured; None: nothing is
            modelled.
        what_ifs: the what-ifs on the import.

    Raises:
        UsageError: a what-if is on links, and no cluster is given, or on the sharing of links or of
            multiprocessors.
    """
    scenario = Scenario(cluster=Cluster.load(cluster or ANY_CLUSTER), what_ifs=tuple(what_ifs))
    for what_if in scenario.hoped.each:
        if cluster is None and isinstance(what_if.form, LinkSpeed | GroupOn):
            raise UsageError(
                f"what-if {what_if.text!r}: communication of this import was measured; with "
                "--cluster, what was not takes its time from a model, and its links may change"
            )
        if isinstance(what_if.form, LinksShared | ComputeShared):
            raise UsageError(
                f"what-if {what_if.text!r}: an import's times were measured, and hold already what "
                "communication and computation took from each other"
            )
    return scenario


def hoped_samples(samples: StepSamples, scenario: Scenario) -> StepSamples:
    """Return the same steps with what-ifs on their computation and its order.

    Raises:
        UsageError: a what-if needs the capture of a null device.
    """
    if not scenario.what_ifs:
        return samples
    graph = Alteration(scenario=scenario, root=Path()).graph(samples.graph)
    classes = [
        _hoped(rank_class, own, scenario)
        for rank_class, own in zip(graph.classes, samples.classes, strict=True)
    ]
    return replace(samples, graph=graph, classes=tuple(classes), observed_step_ns_T=None)


def _hoped(rank_class: RankClass, own: ClassSamples, scenario: Scenario) -> ClassSamples:
    trace = rank_class.trace
    factors = [scenario.hoped.factor_of(label) for label in trace.labels]
    labels = trace.label_N[trace.n_prologue :].tolist()
    nodes = zip(own.body_ns, labels, trace.computes_B.tolist(), strict=True)
    body = [
        scaled(ns_TX, factors[label]) if computes and factors[label] != 1 else ns_TX
        for ns_TX, label, computes in nodes
    ]
    return replace(own, body_ns=tuple(np.asarray(ns) for ns in body))


def import_effects(
    samples: StepSamples, scenario: Scenario, durations: DurationSource, step_ns: int
) -> tuple[Effect, ...]:
    """Return what each what-if touches in an import that takes ``durations`` without them.

    Raises:
        UsageError: a what-if touches nothing.
    """
    plain = Alteration(scenario=replace(scenario, what_ifs=()), root=Path())
    effects = Effects(alteration=plain, graph=samples.graph, durations=durations, step_ns=step_ns)
    return tuple(effects.of(what_if) for what_if in scenario.hoped.each)
