"""Duration pools: groups of recorded durations that count as draws of the same thing.

Nodes of equal signature (PRISM, arXiv 2510.15596: kernel name, shapes and lane; for collectives
also the process group; for pipeline transfers their position) share a pool. Within a pool,
variation between ranks (*spatial*: a slow chip stays slow) is kept apart from variation within a
rank (*temporal*), because only the latter averages out.

Axes: ``T`` recorded steps, ``X`` recorded ranks (computation) or groups (communication), ``R``
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import NodeSignature, StepSamples
from prismscale.forecast.distributions.duration_distribution import Floats, check_durations
from prismscale.graph.node import NodeKind

OTSU_BINS = 64
SAME_WITHIN = 2.0
"""Positions whose medians lie within this factor are draws of the same thing. Where they do not,
and clearly form two groups, the signature is not specific enough (a gap before a kernel and one
before a step)."""
CLEAR_SEPARATION = 0.7
"""Share of the variance between Otsu's two classes from which on they count as two. An even spread
has 0.75 of its variance there at most, a normal distribution 0.64."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Durations that are draws of the same thing."""

    signature: NodeSignature
    ever_bubble: bool | None
    """For sends and receives: whether these positions contain waiting (decided by Otsu's method).
    None for all other kinds."""
    nodes: tuple[tuple[int, int], ...]
    """(class, body node) of every node that draws from the pool."""
    durations_ns: Floats
    spatial_cv: float
    """Standard deviation between the means of ranks (or groups), divided by the pool's mean."""
    temporal_cv: float
    """Root of the mean variance within a rank (or group), divided by the pool's mean."""

    @property
    def name(self) -> str:
        """Name in tables: label, group, stage, and whether it bubbles."""
        s = self.signature
        group = f" {s.group or 'group'}×{s.group_size}" if s.kind != NodeKind.COMPUTE else ""
        bubble = {None: "", True: " (bubble)", False: " (no bubble)"}[self.ever_bubble]
        stage = f" @{s.stage}" if s.stage >= 0 else ""
        return f"{s.label}{group}{stage}{bubble}"


def pools_of(samples: StepSamples) -> list[Pool]:
    """Return all pools of a recording, in order of first appearance.

    Copies of a communication whose duration is read from another class are left out.

    Raises:
        FormatError: durations are negative or not finite.
    """
    rows: dict[NodeSignature, list[tuple[int, int]]] = {}
    for rank_class in samples.graph.classes:
        for node in range(rank_class.trace.n_body):
            if _is_read(samples, rank_class.index, node):
                key = samples.signature(rank_class.index, node)
                rows.setdefault(key, []).append((rank_class.index, node))
    found: list[Pool] = []
    for signature, nodes in rows.items():
        if signature.kind in (NodeKind.SEND, NodeKind.RECV):
            for ever, part in _split_by_bubble(samples, nodes):
                found.append(_pool(samples, signature, ever, part))
        else:
            for part in _split_by_size(samples, nodes):
                found.append(_pool(samples, signature, None, part))
    return found


def rank_factors(samples: StepSamples) -> Floats:
    """Return the spatial factor of every rank: its computation time relative to that of its peers.

    Peers are ranks with work of the same signature. For each signature, the median durations of a
    rank's nodes are averaged and compared with the median of its peers' averages. Signatures are
    weighted by their share of time, because a factor must show in what the rank mostly does. A rank
    without peers has factor 1.
    """
    factor_R = np.ones(samples.graph.world_size)
    spent = [_spent(samples, c.index) for c in samples.graph.classes]
    peers: dict[NodeSignature, list[Floats]] = {}
    for of_class in spent:
        for signature, median_NX in of_class.items():
            peers.setdefault(signature, []).append(median_NX.mean(axis=0))
    usual = {signature: float(np.median(np.concatenate(p))) for signature, p in peers.items()}
    for rank_class, of_class in zip(samples.graph.classes, spent, strict=True):
        if of_class:
            own_X = sum(median_NX.sum(axis=0) for median_NX in of_class.values())
            expected = sum(usual[s] * len(median_NX) for s, median_NX in of_class.items())
            columns_M = samples.classes[rank_class.index].column_M
            factor_R[rank_class.members_M] = (own_X / expected)[columns_M]
    return factor_R


def _spent(samples: StepSamples, class_index: int) -> dict[NodeSignature, Floats]:
    """Return the median durations ``[N, X]`` of a class's computation, by signature."""
    own = samples.classes[class_index]
    found: dict[NodeSignature, list[Floats]] = {}
    for node, ns_TX in enumerate(own.body_ns):
        signature = samples.signature(class_index, node)
        if signature.kind == NodeKind.COMPUTE:
            median_X = np.broadcast_to(np.median(ns_TX, axis=0), (own.n_columns,))
            found.setdefault(signature, []).append(median_X)
    stacked = {signature: np.stack(parts) for signature, parts in found.items()}
    return {signature: parts for signature, parts in stacked.items() if parts.any()}


def otsu_threshold(values: Floats) -> float:
    """Return the value that best cuts a sample in two (Otsu, IEEE Trans. SMC 9(1), 1979).

    It maximises the variance between the two parts. It is found on logarithms, so that a long tail
    does not decide alone.
    """
    logs = np.log(np.maximum(values, 1.0))
    edges = np.linspace(logs.min(), logs.max(), OTSU_BINS + 1)
    between = np.array([_between_variance(logs, logs <= edge) for edge in edges[1:-1]])
    # All edges in a stretch without values cut the sample in the same way; the middle one is the
    # safest.
    best = np.flatnonzero(between >= between.max() * (1 - 1e-9))
    return float(np.exp(edges[1:-1][best].mean()))


def _between_variance(logs: Floats, low: NDArray[np.bool_]) -> float:
    share = float(low.mean())
    if share in (0.0, 1.0):
        return 0.0
    gap = float(logs[low].mean() - logs[~low].mean())
    return share * (1 - share) * gap**2


def _split_by_bubble(
    samples: StepSamples, nodes: list[tuple[int, int]]
) -> list[tuple[bool, list[tuple[int, int]]]]:
    """Split positions into those that never bubble and those that ever do.

    All are in the first part where none stand out.
    """
    # A position that bubbles once is an ever-bubble position, so its longest duration decides.
    longest = np.array([samples.classes[c].body_ns[n].max() for c, n in nodes], dtype=np.float64)
    if len(nodes) < 2 or longest.min() == longest.max():
        return [(False, nodes)]
    threshold = otsu_threshold(longest)
    logs = np.log(np.maximum(longest, 1.0))
    low = longest <= threshold
    if _between_variance(logs, low) < CLEAR_SEPARATION * logs.var():
        return [(False, nodes)]
    never = [node for node, below in zip(nodes, low, strict=True) if below]
    ever = [node for node, below in zip(nodes, low, strict=True) if not below]
    return [(False, never), (True, ever)]


def _split_by_size(
    samples: StepSamples, nodes: list[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Split the positions of one signature, again and again, where medians clearly fall apart."""
    medians = np.array([np.median(samples.classes[c].body_ns[n]) for c, n in nodes])
    medians = np.maximum(medians, 1.0)
    if medians.max() <= SAME_WITHIN * medians.min():
        return [nodes]
    logs, low = np.log(medians), medians <= otsu_threshold(medians)
    if low.all() or _between_variance(logs, low) < CLEAR_SEPARATION * logs.var():
        return [nodes]
    below = [node for node, is_low in zip(nodes, low, strict=True) if is_low]
    above = [node for node, is_low in zip(nodes, low, strict=True) if not is_low]
    return [*_split_by_size(samples, below), *_split_by_size(samples, above)]


def _is_read(samples: StepSamples, class_index: int, node: int) -> bool:
    """Return False for a copy of a communication that holds zeros: another class is read."""
    rank_class = samples.graph.classes[class_index]
    trace = rank_class.trace
    i = trace.n_prologue + node
    kind = trace.kind_N[i]
    if kind == NodeKind.COMPUTE or kind == NodeKind.SEND:
        return True
    if kind == NodeKind.RECV:
        return False
    table = samples.graph.families[rank_class.slots[int(trace.group_index_N[i])].family].ranks_KG
    return bool(samples.graph.class_of_R[table[0, 0]] == class_index)


def _pool(
    samples: StepSamples,
    signature: NodeSignature,
    ever_bubble: bool | None,
    nodes: list[tuple[int, int]],
) -> Pool:
    arrays = [samples.classes[c].body_ns[n].astype(np.float64) for c, n in nodes]
    flat = check_durations(np.concatenate([a.ravel() for a in arrays]), signature.label)
    mean = float(flat.mean())
    # Positions of one signature may differ in their mean (a longer first microbatch). That
    # difference is neither spatial nor temporal, so both variances are computed within a position.
    between = float(np.mean([a.mean(axis=0).var() for a in arrays]))
    within = float(np.mean([a.var(axis=0).mean() for a in arrays]))
    return Pool(
        signature=signature,
        ever_bubble=ever_bubble,
        nodes=tuple(nodes),
        durations_ns=flat,
        spatial_cv=float(np.sqrt(between)) / mean if mean else 0.0,
        temporal_cv=float(np.sqrt(within)) / mean if mean else 0.0,
    )
