"""A run's graph as its scenario has it: at other costs of its kernels, and with its what-ifs.

A run folder keeps the graph as it was captured. What a scenario changes in traces is changed
whenever they are read, by whoever reads them; nodes keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_changes import KernelFactor
from prismscale.durations.recosting import Recosting
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace
from prismscale.graph.verify import verify


@dataclass(frozen=True, kw_only=True)
class Alteration:
    """What a scenario changes in the traces of a run."""

    scenario: Scenario
    root: Path
    """The run folder."""
    stored: Scenario | None = None
    """By whose costs of kernels the traces were stored; None: by the scenario's."""

    def graph(self, graph: JobGraph) -> JobGraph:
        """The graph as it would be.

        Raises:
            UsageError: what cannot be told without another capture.
            GraphError: members of a group would no longer agree.
        """
        return self.ordered(self.costed(graph))

    def costed(self, graph: JobGraph) -> JobGraph:
        """The graph with its computation at the scenario's costs."""
        own = {id(c.trace): c.trace for c in graph.classes}
        found = self.costed_traces(own)
        return _with_traces(graph, own, found, check=not self.scenario.hoped.recomputes)

    def ordered(self, graph: JobGraph) -> JobGraph:
        """The graph with the edges of communications that block computation."""
        if not self.scenario.hoped.overlaps:
            return graph
        own = {id(c.trace): c.trace for c in graph.classes}
        found = {key: self.scenario.hoped.ordered(trace) for key, trace in own.items()}
        return _with_traces(graph, own, found)

    def costed_traces(self, traces: Mapping[int, RankTrace]) -> dict[int, RankTrace]:
        """Traces with their computation at the scenario's costs, by the same keys.

        Raises:
            UsageError: see :meth:`graph`.
        """
        scenario, hoped = self.scenario, self.scenario.hoped
        if scenario.kernel_costs is None:
            return {key: _scaled(trace, scenario) for key, trace in traces.items()}
        is_as_stored = self.stored is None or scenario.costs_kernels_as(self.stored)
        if is_as_stored and not hoped.kernels and hoped.recomputes:
            return dict(traces)
        return {key: self.recosting.trace(trace) for key, trace in traces.items()}

    @cached_property
    def recosting(self) -> Recosting:
        """How a null run's computation is costed."""
        scenario, hoped = self.scenario, self.scenario.hoped
        return Recosting(
            captures=self.root / scenario.captures,
            model=scenario.kernel_model(hoped.kernels),
            stored_model=(self.stored or scenario).kernel_model(),
            recomputes=hoped.recomputes,
        )


def _with_traces(
    graph: JobGraph,
    own: Mapping[int, RankTrace],
    found: Mapping[int, RankTrace],
    *,
    check: bool = False,
) -> JobGraph:
    """``graph`` whose classes have other traces; those that share one go on sharing it."""
    if all(found[key] is trace for key, trace in own.items()):
        return graph
    classes = tuple(replace(c, trace=found[id(c.trace)]) for c in graph.classes)
    altered = replace(graph, classes=classes)
    if check:
        verify(altered)
    return altered


def labelled_nodes(trace: RankTrace, pattern: str) -> NDArray[np.bool_]:
    """Computations (N) of a measured trace whose label a regular expression names: a phase of the
    program, or a kernel of an imported trace."""
    is_meant = [re.fullmatch(pattern, label) is not None for label in trace.labels]
    return np.array(is_meant)[trace.label_N] & ~trace.communicates_N


def _scaled(trace: RankTrace, scenario: Scenario) -> RankTrace:
    """A measured trace with what-ifs on its kernels."""
    hoped = scenario.hoped
    if not all(isinstance(change, KernelFactor) for change in hoped.kernels):
        raise UsageError(
            "what-ifs 'dtype=…' and 'host=…': the computation of this run was measured as a whole, "
            "so that neither its products nor its launches are known; run the program with "
            "--device null"
        )
    if not hoped.recomputes:
        raise UsageError(
            "what-if 'recompute=off': the computation of this run was measured as a whole; run the "
            "program with --device null, which tells what is computed again"
        )
    factors = np.array([hoped.factor_of(label) for label in trace.labels])
    factor_N = np.where(trace.communicates_N, 1.0, factors[trace.label_N])
    if (factor_N == 1).all():
        return trace
    first = trace.n_prologue
    return replace(
        trace,
        prologue_ns=np.rint(trace.prologue_ns * factor_N[:first]).astype(np.int64),
        body_ns_SB=np.rint(trace.body_ns_SB * factor_N[first:]).astype(np.int64),
    )
