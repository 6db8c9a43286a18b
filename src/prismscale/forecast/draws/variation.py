"""Distributions for a graph made by rule: known durations with assumed or measured variation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.graph_durations import GraphDurations
from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import (
    BodyAndTail,
    DurationDistribution,
    Empirical,
    Gamma,
    LogNormal,
)
from prismscale.forecast.draws.sampling import NO_DISTRIBUTION, DistributionDraws, NodeDistribution
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import NodeKind

COMMUNICATION_CV = 0.02
"""Coefficient of variation (CV) of communication, without waiting. It is the median over the
communication pools of two production traces; ``prismscale validate forecast`` prints it. Stalls are
not included: one pool in six had them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How much durations vary on a cluster where this was not measured."""

    compute_cv: float = 0.02
    """CV of a computation within a rank, from one execution to the next. PRISM (arXiv 2510.15596):
    a GEMM varies by 0.98-6.46 % over time on one GPU."""
    communication_cv: float = COMMUNICATION_CV
    stall_probability: float = 0.0
    """Probability that a communication stalls."""
    stall_factor: float = 10.0
    """How many times its ordinary time a stalled communication takes."""

    def __post_init__(self) -> None:
        if min(self.compute_cv, self.communication_cv) < 0:
            raise UsageError("coefficients of variation must be 0 or more")
        if not 0 <= self.stall_probability < 1 or self.stall_factor <= 1:
            raise UsageError("stall_probability lies in [0, 1), stall_factor beyond 1")

    def compute(self, mean_ns: float) -> DurationDistribution:
        """Return a computation's distribution. It is Gamma, so that sums of kernels stay in the
        family."""
        if self.compute_cv == 0:
            return Empirical(sorted_ns=np.array([mean_ns]))
        # A gamma's mean is shape × scale, its coefficient of variation shape^(-1/2).
        shape = self.compute_cv**-2
        return Gamma(shape=shape, scale=mean_ns / shape)

    def communication(self, mean_ns: float) -> DurationDistribution:
        """Return the distribution of a communication: LogNormal, with stalls if there are any."""
        if self.communication_cv == 0:
            body: DurationDistribution = Empirical(sorted_ns=np.array([mean_ns]))
        else:
            # A log-normal's mean is exp(mean_log + std_log² / 2).
            std_log = float(np.sqrt(np.log1p(self.communication_cv**2)))
            body = LogNormal(mean_log=float(np.log(mean_ns)) - std_log**2 / 2, std_log=std_log)
        if self.stall_probability == 0:
            return body
        return BodyAndTail(
            body=body,
            stall=self.stall_probability,
            tail_from=2 * mean_ns,
            tail_scale=(self.stall_factor - 2) * mean_ns if self.stall_factor > 2 else mean_ns,
        )


def vary(graph: JobGraph, durations: GraphDurations, variation: Variation) -> DistributionDraws:
    """Return distributions for every node of ``graph`` around its known duration.

    Where the groups of a family differ in their communication time (uneven nodes), the slowest
    one's time is used for all.
    """
    distributions: dict[tuple[bool, str, int], int] = {}
    table: list[NodeDistribution] = []
    distribution_CB = []
    for rank_class in graph.classes:
        distribution_B: NDArray[np.int64] = np.full(
            rank_class.trace.n_body, NO_DISTRIBUTION, dtype=np.int64
        )
        for node, base in enumerate(durations.body(rank_class.index, 0)):
            mean_ns = int(np.max(base))
            if mean_ns == 0:
                continue
            is_compute, label = _describe(rank_class, node)
            key = (is_compute, label, mean_ns)
            if key not in distributions:
                distributions[key] = len(table)
                table.append(
                    NodeDistribution(name=label, compute=variation.compute(mean_ns))
                    if is_compute
                    else NodeDistribution(
                        name=label, communication=variation.communication(mean_ns)
                    )
                )
            distribution_B[node] = distributions[key]
        distribution_CB.append(distribution_B)
    return DistributionDraws(
        graph=graph, distributions=tuple(table), distribution_CB=tuple(distribution_CB)
    )


def _describe(rank_class: RankClass, node: int) -> tuple[bool, str]:
    trace = rank_class.trace
    i = trace.n_prologue + node
    return bool(trace.kind_N[i] == NodeKind.COMPUTE), trace.labels[int(trace.label_N[i])]
