"""The speed of the machine, followed while live ranks run.

[Note: machine drift] Ranks of a CPU target share one processor, and the speed of a virtual
processor is not constant: the same arithmetic took 18 ms and, seconds later, 28 ms on the two cores
these figures come from. Durations are as old as their capture. Virtual ranks would compute at the
speed of that minute, beside live ranks that compute at the speed of this one. Each live rank
therefore reports after every step how long it computed. The ratio of that to its trace, over the
last few steps, is the factor on the virtual ranks' durations. The factor applies to communications
too, because the same processor works on them, but not to the part that moves their bytes. The
factor follows the machine, not the rank: a rank that ``--slow`` makes slow reports how long its
computation took here. Targets whose links are modelled keep the captured durations: the time that a
live rank needs to emulate hundreds of small communications would look like a slow machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.source import NEVER, Duration
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace

WINDOW_STEPS = 32
"""Number of recent steps that count.

Fewer steps would follow the live rank's own jitter. The virtual ranks' jitter is independent of it,
and their samples have it already.
"""
MOVED_BYTES_PER_NS = 2.0
"""Speed at which a communication's bytes move, whatever the speed of the processor.

The rest of its duration follows the processor. See [Note: bytes move at their own pace].
"""
MOST_MOVING = 0.42
"""Largest share of a communication's duration that moves bytes."""
TRIMMED = 0.1
"""Share of steps left out at either end of the mean: a hiccup is not the machine's speed."""


def trimmed_mean(values: ArrayLike) -> float:
    """Mean of the values without the share :data:`TRIMMED` at either end."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(TRIMMED * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def captured_compute_ns(trace: RankTrace) -> float:
    """Computation (ns) in a captured step: trimmed mean over the samples."""
    return trimmed_mean(trace.compute_ns_S)


@dataclass(kw_only=True)
class MachineSpeed:
    """Ratio of the time that computation takes now to the time that it took when captured."""

    captured_ns: dict[int, float]
    """Computation in one captured step, by live rank."""
    factor: float = 1.0
    """The ratio; 1 while nothing was observed."""
    _recent: dict[int, deque[float]] = field(default_factory=dict)

    def observe(self, rank: int, compute_ns: int) -> None:
        """Note how long live rank ``rank`` computed in the step that just ended."""
        if self.captured_ns[rank] > 0 and compute_ns > 0:
            recent = self._recent.setdefault(rank, deque(maxlen=WINDOW_STEPS))
            recent.append(compute_ns / self.captured_ns[rank])
            self.factor = float(np.mean([trimmed_mean(r) for r in self._recent.values()]))


@dataclass(kw_only=True)
class DriftingDurations:
    """Durations at the machine's present speed. A step keeps the factor it began with.

    [Note: bytes move at their own pace] A core becomes slow when a neighbour shares it, but copies
    wait for memory no longer than before. Over 24 captures of the llama example, at speeds that
    differed by half, an all-reduce of 128 KiB took 0.09 ms plus 1.22 ms times the slowness of
    computation, an all-gather of 2.8 MiB 1.7 ms plus 2.1 ms times it, and an all-reduce of 24.5 MiB
    8.7 ms plus 13.2 ms times it. In those captures one rank did the work alone. Where ranks really
    communicated, their captured steps show how much longer the communications of a slow step took
    (see :func:`communication_slope`).
    """

    durations: GraphDurations
    speed: MachineSpeed

    def __post_init__(self) -> None:
        slope = communication_slope(self.durations.graph)
        self._paces = [_paces(c.trace, slope) for c in self.durations.graph.classes]

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Durations of the prologue, as captured: nothing was observed before the first step."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Durations of the body in ``step``."""
        body, factor = self.durations.body(class_index, step), self.speed.factor
        if factor == 1.0:
            return body
        paces = self._paces[class_index]
        return [_scaled(d, factor, pace) for d, pace in zip(body, paces, strict=True)]


def communication_slope(graph: JobGraph) -> float | None:
    """Exponent ``b`` in "time of communication ∝ (time of computation)^b".

    Least squares on the logarithms over captured steps, limited to between 0 and 1. None where
    ranks did not really communicate.

    Slices of two ranks on two cores, four captures each: 0.5 for all-reduces of 24.5 MiB beside a
    backward pass and for fully sharded parameters, 0.2 for all-reduces of 128 KiB, which mostly
    wait for threads to be scheduled.
    """
    together = alone = 0.0
    for trace in (c.trace for c in graph.classes):
        if trace.facts.co_run is None:
            return None
        totals = trace.compute_ns_S, trace.body_ns_SB[:, ~trace.computes_B].sum(1)
        if any((t <= 0).any() for t in totals):
            continue
        computed_S, communicated_S = (np.log(t) - np.log(t).mean() for t in totals)
        together += float((computed_S * communicated_S).sum())
        alone += float((computed_S**2).sum())
    return min(1.0, max(0.0, together / alone)) if alone > 0 else 0.0


class Pace(NamedTuple):
    """How a node's duration follows the machine's speed."""

    power: float = 1.0
    """Exponent on the slowness of computation."""
    moving_ns: float = 0.0
    """Time that moving its bytes takes, whatever the speed."""


def _paces(trace: RankTrace, slope: float | None) -> list[Pace]:
    """The pace of each body node. ``slope`` is the power of communications, None if unmeasured."""
    bytes_B = trace.bytes_N[trace.n_prologue :].tolist()
    if slope is None:
        communications = [Pace(moving_ns=n / MOVED_BYTES_PER_NS) for n in bytes_B]
    else:
        communications = [Pace(power=slope)] * trace.n_body
    computes = trace.computes_B.tolist()
    return [Pace() if c else pace for c, pace in zip(computes, communications, strict=True)]


def _scaled(duration: Duration, factor: float, pace: Pace) -> Any:
    slower = factor**pace.power
    if isinstance(duration, int):
        if duration >= NEVER:
            return duration
        fixed = min(pace.moving_ns, MOST_MOVING * duration)
        return round(fixed + (duration - fixed) * slower)
    fixed = np.minimum(pace.moving_ns, MOST_MOVING * duration)
    scaled = np.rint(fixed + (duration - fixed) * slower).astype(np.int64)
    return np.where(duration >= NEVER, duration, scaled)
