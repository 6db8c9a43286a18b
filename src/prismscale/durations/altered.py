"""A run's graph under its scenario: with the scenario's kernel costs and its what-ifs.

A run folder keeps the graph as it was captured. Every reader applies the scenario's changes when it
reads the traces. Nodes keep their numbers.
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
    """The changes that a scenario makes to the traces of a run."""

    scenario: Scenario
    root: Path
    """The run folder."""
    stored: Scenario | None = None
    """Scenario whose kernel costs the stored traces have; None: :attr:`scenario`'s."""

    def graph(self, graph: JobGraph) -> JobGraph:
        """Return the graph with all changes of the scenario.

        Raises:
            UsageError: a change needs another capture.
            GraphError: the members of a group would no longer agree.
        """
        return self.ordered(self.costed(graph))

    def costed(self, graph: JobGraph) -> JobGraph:
        """Return the graph with its computation at the scenario's costs."""
        own = {id(c.trace): c.trace for c in graph.classes}
        found = self.costed_traces(own)
        return _with_traces(graph, own, found, check=not self.scenario.hoped.recomputes)

    def ordered(self, graph: JobGraph) -> JobGraph:
        """Return the graph with added edges for communications that block computation."""
        if not self.scenario.hoped.overlaps:
            return graph
        own = {id(c.trace): c.trace for c in graph.classes}
        found = {key: self.scenario.hoped.ordered(trace) for key, trace in own.items()}
        return _with_traces(graph, own, found)

    def costed_traces(self, traces: Mapping[int, RankTrace]) -> dict[int, RankTrace]:
        """Return the traces with their computation at the scenario's costs, by the same keys.

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
        """Costs the computation of a null run's traces again, from their launch logs."""
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
    """Return ``graph`` with other traces in its classes; classes that share a trace still do."""
    if all(found[key] is trace for key, trace in own.items()):
        return graph
    classes = tuple(replace(c, trace=found[id(c.trace)]) for c in graph.classes)
    altered = replace(graph, classes=classes)
    if check:
        verify(altered)
    return altered


def labelled_nodes(trace: RankTrace, pattern: str) -> NDArray[np.bool_]:
    """Return which nodes (N) of a measured trace are computations whose label matches ``pattern``.

    The label is a phase of the program, or a kernel of an imported trace.
    """
    is_meant = [re.fullmatch(pattern, label) is not None for label in trace.labels]
    return np.array(is_meant)[trace.label_N] & ~trace.communicates_N


def _scaled(trace: RankTrace, scenario: Scenario) -> RankTrace:
    """Apply the what-ifs on kernels to a measured trace."""
    hoped = scenario.hoped
    if not all(isinstance(change, KernelFactor) for change in hoped.kernels):
        raise UsageError(
            "what-ifs 'dtype=…' and 'host=…': the computation of this run was measured as a whole, "
            "so that neither its products nor its launches are known; run the program with "
            "--device null"
        )
    if hoped.shares_compute:
        raise UsageError(
            "what-if 'compute=shared': the computation of this run was measured beside the "
            "communication of its slice; run the program with --device null"
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
