"""Which links a communication crosses, and how much they make its duration vary.

A collective is as slow as its slowest link. Where one member of the drawn graph stands for a set of
ranks, it is as slow as the slowest of the groups that run in parallel through the set. Both are the
largest of independent normal variables.
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
"""Number of tabulated, evenly spaced quantiles of the largest of several normal variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """Links that the communications of one channel cross."""

    scope: str
    links: int
    """Number of links of one group that can be its slowest."""
    parallel: int
    """Number of groups of the whole job that one group of the drawn graph stands for."""


def crossing(ranks_KG: NDArray[np.int64], parallel: int, per_node: int, per_pod: int) -> Crossing:
    """Return what groups of global ranks cross; where groups differ, the farthest one counts.

    Args:
        per_node: number of ranks that NVLink connects.
        per_pod: number of such sets of ranks in a pod.
    """
    node_KG = ranks_KG // per_node
    apart = node_KG.max(axis=0) != node_KG.min(axis=0)
    if not apart.any():
        return Crossing(scope=NVLINK, links=len(ranks_KG), parallel=parallel)
    pod_KG = node_KG // per_pod
    far = (pod_KG.max(axis=0) != pod_KG.min(axis=0)).any()
    farthest = int(np.argmax(node_KG.max(axis=0) - node_KG.min(axis=0)))
    nodes = len(np.unique(node_KG[:, farthest]))
    # A message between two nodes uses one link; a ring over n nodes uses n.
    links = nodes if nodes > 2 else 1
    return Crossing(scope=PODS if far else RAIL, links=links, parallel=parallel)


def largest(rng: np.random.Generator, of: int, shape: tuple[int, int]) -> Factors:
    """Draw the largest of ``of`` standard normal variables, ``shape`` times."""
    if of == 1:
        return rng.standard_normal(shape, dtype=np.float32)
    return _quantiles(of)[rng.integers(0, TABLED, shape, dtype=np.uint16)]


@lru_cache(maxsize=64)
def _quantiles(of: int) -> Factors:
    # P(largest < x) = Φ(x)^of.
    at = (np.arange(TABLED) + 0.5) / TABLED
    quantiles: Factors = scipy.special.ndtri(at ** (1 / of)).astype(np.float32)
    return quantiles
