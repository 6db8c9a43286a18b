"""The speed of the machine, followed while live ranks run.

[Note: machine drift] Ranks of a CPU target share one processor, and a virtual one is not constant:
the same arithmetic took 18 ms and, seconds later, 28 ms on the two cores these figures come from.
Durations are as old as their capture, so virtual ranks would compute at the speed of that minute
beside live ranks that compute at this one's. Each live rank therefore says after every step how
long it computed; over the last few steps this is so many times what its trace says, and the virtual
ranks' durations are taken so many times: communication too, which is the same processor's work, but
for the part that moves its bytes. It is the machine that is followed, not the rank: a rank that
``--slow`` makes slow says what its computation took here. Targets whose links are modelled keep the
captured durations: what emulating hundreds of small communications costs a live rank would look
like a slow machine.
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
"""Steps that count. Fewer would follow what is the live rank's own jitter; that of the virtual ones
is in their samples, and independent."""
MOVED_BYTES_PER_NS = 2.0
"""How fast a communication's bytes move at any speed of the processor; what else it takes follows
that speed. See [Note: bytes move at their own pace]."""
MOST_MOVING = 0.42
"""Largest share of a communication that moves bytes."""
TRIMMED = 0.1
"""Share of steps left out at either end of the mean: a hiccup is not the machine's speed."""


def trimmed_mean(values: ArrayLike) -> float:
    """Mean without :data:`TRIMMED` of the values at either end."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(TRIMMED * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def captured_compute_ns(trace: RankTrace) -> float:
    """Computation (ns) of a captured step: trimmed mean over the samples."""
    return trimmed_mean(trace.compute_ns_S)


@dataclass(kw_only=True)
class MachineSpeed:
    """How long computation takes now, over what it took when it was captured."""

    captured_ns: dict[int, float]
    """Computation of one captured step, by live rank."""
    factor: float = 1.0
    """1 while nothing was observed."""
    _recent: dict[int, deque[float]] = field(default_factory=dict)

    def observe(self, rank: int, compute_ns: int) -> None:
        """Live rank ``rank`` computed so long in the step that just ended."""
        if self.captured_ns[rank] > 0 and compute_ns > 0:
            recent = self._recent.setdefault(rank, deque(maxlen=WINDOW_STEPS))
            recent.append(compute_ns / self.captured_ns[rank])
            self.factor = float(np.mean([trimmed_mean(r) for r in self._recent.values()]))


@dataclass(kw_only=True)
class DriftingDurations:
    """Durations at the machine's present speed. A step keeps the factor it began with.

    [Note: bytes move at their own pace] A core is slow when a neighbour shares it; copies wait for
    memory then as before. Over 24 captures of the llama example, at speeds that differed by half,
    an all-reduce of 128 KiB took 0.09 ms and 1.22 ms times the slowness of computation; an
    all-gather of 2.8 MiB 1.7 and 2.1 ms; an all-reduce of 24.5 MiB 8.7 and 13.2 ms. Those were made
    by one rank alone. Where ranks really communicated, their captured steps say how much more a
    slow step's communications took (see :func:`communication_slope`).
    """

    durations: GraphDurations
    speed: MachineSpeed

    def __post_init__(self) -> None:
        slope = communication_slope(self.durations.graph)
        self._paces = [_paces(c.trace, slope) for c in self.durations.graph.classes]

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """As captured: nothing was observed before the first step."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Durations of the body in ``step``."""
        body, factor = self.durations.body(class_index, step), self.speed.factor
        if factor == 1.0:
            return body
        paces = self._paces[class_index]
        return [_scaled(d, factor, pace) for d, pace in zip(body, paces, strict=True)]


def communication_slope(graph: JobGraph) -> float | None:
    """Exponent ``b`` in "time of communication ∝ (time of computation)^b": least squares on the
    logarithms over captured steps, between 0 and 1. None where ranks did not really communicate.

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
    """Of the slowness of computation."""
    moving_ns: float = 0.0
    """What moving its bytes takes, at any speed."""


def _paces(trace: RankTrace, slope: float | None) -> list[Pace]:
    """By body node. ``slope`` is that of communications, None where it was not measured."""
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
