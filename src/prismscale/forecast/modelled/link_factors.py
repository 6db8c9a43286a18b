"""Which links a communication crosses, and how unsteady they make it.

A collective goes at the pace of its slowest link, and where one member of the drawn graph stands
for a set of ranks, at that of the slowest of the groups that run in parallel through the set: both
are the largest of independent normal variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.cost.variability import NVLINK, PODS, RAIL

Factors = NDArray[np.float32]
TABLED = 2**16
"""Evenly spaced quantiles of the largest of several normal variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """What the communications of one channel cross."""

    scope: str
    links: int
    """Links of one group that can be its slowest."""
    parallel: int
    """Groups of the whole job that one group of the drawn graph stands for."""


def crossing(ranks_KG: NDArray[np.int64], parallel: int, per_node: int, per_pod: int) -> Crossing:
    """Of groups of global ranks; where they differ, the farthest one's.

    Args:
        per_node: ranks that NVLink connects. per_pod: so many times as many are a pod.
    """
    node_KG = ranks_KG // per_node
    apart = node_KG.max(axis=0) != node_KG.min(axis=0)
    if not apart.any():
        return Crossing(scope=NVLINK, links=len(ranks_KG), parallel=parallel)
    pod_KG = node_KG // per_pod
    far = (pod_KG.max(axis=0) != pod_KG.min(axis=0)).any()
    farthest = int(np.argmax(node_KG.max(axis=0) - node_KG.min(axis=0)))
    nodes = len(np.unique(node_KG[:, farthest]))
    # A message between two nodes is one link; a ring over n nodes is n.
    links = nodes if nodes > 2 else 1
    return Crossing(scope=PODS if far else RAIL, links=links, parallel=parallel)


def largest(rng: np.random.Generator, of: int, shape: tuple[int, int]) -> Factors:
    """The largest of ``of`` standard normal variables, drawn ``shape`` times."""
    if of == 1:
        return rng.standard_normal(shape, dtype=np.float32)
    return _quantiles(of)[rng.integers(0, TABLED, shape, dtype=np.uint16)]


@lru_cache(maxsize=64)
def _quantiles(of: int) -> Factors:
    # P(largest < x) = Φ(x)^of.
    at = (np.arange(TABLED) + 0.5) / TABLED
    quantiles: Factors = scipy.special.ndtri(at ** (1 / of)).astype(np.float32)
    return quantiles
