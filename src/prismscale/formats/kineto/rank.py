"""Builds the program of one rank from its Kineto trace.

The host is one lane: threads of a PyTorch process hand over to each other (the autograd thread
runs while the main thread waits for it). Host nodes are the stretches of time between launches.
Each launched activity is a node of its stream, behind a ``gap`` node for launch latency. Edges are
host order, stream order, and launch → activity. Two more kinds, which old traces do not record, are
inferred from times: a kernel that starts when a kernel of another stream ends waited for it (event
wait), and a runtime call during which a kernel ended waited for that kernel (synchronization).

Array axes: ``S`` recorded steps, ``N`` nodes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.formats.kineto.communications import ProfiledCommunication, ProfiledCommunications
from prismscale.formats.kineto.events import WAITS, Activity, RankEvents
from prismscale.graph.trace import HOST

GAP = "gap"
STEP_END = "step end"
CLOCK_JUMP_NS = 10_000_000
"""Disorder up to this is rounding; beyond it, a clock jumped."""
WAIT_NS = 20_000
"""A kernel that starts this soon after one of another stream ended counts as waiting for it."""


@dataclass(kw_only=True, slots=True)
class ProfiledNode:
    """One node of a step; only its times differ between steps."""

    label: str
    lane: str
    preds: list[int] = field(default_factory=list)
    """Positions in the step; ``-1 - n`` is position ``n`` of the step before."""
    communication: ProfiledCommunication | None = None


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The usable steps of one rank, all with the same nodes."""

    name: str
    rank: int | None
    step_ids: tuple[int, ...]
    nodes: tuple[ProfiledNode, ...]
    start_ns_SN: NDArray[np.int64]
    end_ns_SN: NDArray[np.int64]
    """As recorded. A gap starts and ends here with its kernel's start; it really lasts from its
    last predecessor's end, which :mod:`.matching` computes."""
    origin_ns_S: NDArray[np.int64]
    """When the host began each step."""
    repairs: tuple[str, ...]

    def only(self, step_ids: list[int]) -> RankSteps:
        """Return these steps only."""
        rows = [self.step_ids.index(step) for step in step_ids]
        return replace(
            self,
            step_ids=tuple(step_ids),
            start_ns_SN=self.start_ns_SN[rows],
            end_ns_SN=self.end_ns_SN[rows],
            origin_ns_S=self.origin_ns_S[rows],
        )


@dataclass(kw_only=True)
class _Step:
    """One recorded step, built node by node."""

    number: int
    origin_ns: int
    nodes: list[ProfiledNode] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    jumped: bool = False
    """Whether a kernel starts long before its launch, or before the kernel ahead of it ends."""
    inferred: set[tuple[int, int]] = field(default_factory=set)
    """(node, predecessor) edges that are inferred from times."""

    @property
    def launches(self) -> bool:
        """True where the step does any device work."""
        return any(node.lane != HOST for node in self.nodes)

    def add(self, node: ProfiledNode, start_ns: int, end_ns: int) -> int:
        self.nodes.append(node)
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        return len(self.nodes) - 1

    def waits_for_last(
        self, node: int, streams: dict[str, list[int]], *, after_ns: int, until_ns: int
    ) -> None:
        """Infer that ``node`` waited for the last kernel to end in ``(after_ns, until_ns]``."""
        latest = None
        for positions in streams.values():
            # Kernels of a stream end in order, so their ends are sorted.
            ended = bisect_right(positions, until_ns, key=lambda p: self.end_ns[p])
            if ended and self.end_ns[positions[ended - 1]] > after_ns:
                position = positions[ended - 1]
                if latest is None or self.end_ns[position] > self.end_ns[latest]:
                    latest = position
        if latest is not None:
            self.inferred.add((node, latest))

    def shape(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Return what must agree between steps: labels, lanes and edges."""
        return tuple((n.label, n.lane, tuple(n.preds)) for n in self.nodes)


def rank_steps(events: RankEvents) -> RankSteps:
    """Build the program of a rank from all of its steps that have the most frequent shape.

    Raises:
        FormatError: no usable step launches device work.
    """
    work = _Work(events)
    steps = [_build(work, n, span) for n, span in _spans(events)]
    steps = [s for s in steps if s.launches]
    repairs = events.repairs()
    jumped = [str(s.number) for s in steps if s.jumped]
    if jumped:
        repairs.append(f"{events.name}: steps {', '.join(jumped)} left out: the clock jumps")
    steps = [s for s in steps if not s.jumped]
    if not steps:
        reasons = "; ".join(repairs)
        raise FormatError(f"{events.name}: no usable step that launches device work {reasons}")
    shapes = Counter(s.shape() for s in steps)
    # Later steps are steadier than the first ones, so of equally frequent shapes the latest wins.
    usual = max(reversed(steps), key=lambda s: shapes[s.shape()]).shape()
    used = [s for s in steps if s.shape() == usual]
    if len(used) < len(steps):
        others = [str(s.number) for s in steps if s.shape() != usual]
        repairs.append(f"{events.name}: steps {', '.join(others)} launch other work: left out")
    return RankSteps(
        name=events.name,
        rank=events.rank,
        step_ids=tuple(s.number for s in used),
        nodes=tuple(_with_waits(used)),
        start_ns_SN=np.array([s.start_ns for s in used], dtype=np.int64),
        end_ns_SN=np.array([s.end_ns for s in used], dtype=np.int64),
        origin_ns_S=np.array([s.origin_ns for s in used], dtype=np.int64),
        repairs=tuple(repairs),
    )


def _spans(events: RankEvents) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield number, start and end of each profiler step.

    A trace without profiler steps is one step, from its first call's start to its last call's end.
    """
    for number, span in sorted(events.steps.items()):
        yield number, (span.start_ns, span.end_ns)
    if not events.steps and events.launches:
        calls = [*events.launches.values(), *events.waits]
        yield 0, (min(a.start_ns for a in calls), max(a.end_ns for a in calls))


class _Work:
    """All runtime calls of a rank that launch or wait, in order, and the activities they launch."""

    def __init__(self, events: RankEvents) -> None:
        self.known = ProfiledCommunications(events)
        self._launched: dict[int, list[Activity]] = defaultdict(list)
        for activity in sorted(events.device, key=lambda a: a.start_ns):
            if activity.correlation >= 0:
                self._launched[activity.correlation].append(activity)
        calls = {id(a): a for a in (*events.launches.values(), *events.waits)}
        self._calls = sorted(calls.values(), key=lambda a: a.start_ns)

    def between(self, start_ns: int, stop_ns: int) -> list[Activity]:
        """Return the calls that begin in ``[start_ns, stop_ns)``."""
        first, last = (
            bisect_left(self._calls, t, key=lambda a: a.start_ns) for t in (start_ns, stop_ns)
        )
        return self._calls[first:last]

    def launched(self, call: Activity) -> Sequence[Activity]:
        """Return the activities that a call launched, in order: those of a CUDA graph are many."""
        return self._launched.get(call.correlation, ())


def _build(work: _Work, number: int, span: tuple[int, int]) -> _Step:
    start_ns, stop_ns = span
    step = _Step(number=number, origin_ns=start_ns)
    host = step.add(ProfiledNode(label=GAP, lane=HOST), start_ns, start_ns)
    streams: dict[str, list[int]] = {}
    for call in work.between(start_ns, stop_ns):
        host = _host(step, host, call.start_ns)
        for kernel in work.launched(call):
            _launch(step, work.known.of_kernel(kernel), kernel, host, streams)
        if any(word in call.name for word in WAITS):
            node = step.add(
                ProfiledNode(label=call.name, lane=HOST, preds=[host]),
                step.end_ns[host],
                max(step.end_ns[host], call.end_ns),
            )
            step.waits_for_last(node, streams, after_ns=call.start_ns, until_ns=call.end_ns)
            host = node
    host = _host(step, host, stop_ns)
    step.nodes[0].preds = [-1 - host]
    _close(step, host, streams)
    return step


def _host(step: _Step, before: int, until_ns: int) -> int:
    """Add the host's work after node ``before``, until it launches or waits at ``until_ns``."""
    now = step.end_ns[before]
    return step.add(ProfiledNode(label=HOST, lane=HOST, preds=[before]), now, max(now, until_ns))


def _launch(
    step: _Step,
    communication: ProfiledCommunication | None,
    kernel: Activity,
    host: int,
    streams: dict[str, list[int]],
) -> None:
    lane = f"stream {kernel.lane}"
    gap = step.add(
        ProfiledNode(label=GAP, lane=lane, preds=[host]), kernel.start_ns, kernel.start_ns
    )
    ready_ns = step.end_ns[host]
    if lane in streams:
        before = streams[lane][-1]
        step.nodes[gap].preds.append(before)
        ready_ns = max(ready_ns, step.end_ns[before])
    step.jumped |= ready_ns - kernel.start_ns > CLOCK_JUMP_NS
    others = {name: positions for name, positions in streams.items() if name != lane}
    soonest = max(ready_ns, kernel.start_ns - WAIT_NS)
    step.waits_for_last(gap, others, after_ns=soonest, until_ns=kernel.start_ns)
    node = ProfiledNode(label=kernel.name, lane=lane, preds=[gap], communication=communication)
    streams.setdefault(lane, []).append(step.add(node, kernel.start_ns, kernel.end_ns))


def _close(step: _Step, host: int, streams: dict[str, list[int]]) -> None:
    """Add the stream order across the step's border, and the node at which the step ends."""
    for positions in streams.values():
        gap = positions[0] - 1
        step.nodes[gap].preds.append(-1 - positions[-1])
    ends = [host, *(positions[-1] for positions in streams.values())]
    over = max(step.end_ns[e] for e in ends)
    step.add(ProfiledNode(label=STEP_END, lane=HOST, preds=ends), over, over)


def _with_waits(steps: list[_Step]) -> list[ProfiledNode]:
    """Return the nodes, with the inferred edges that more than half of the steps show."""
    votes = Counter(edge for step in steps for edge in step.inferred)
    nodes = steps[-1].nodes
    for (node, waited), count in sorted(votes.items()):
        if 2 * count > len(steps) and waited not in nodes[node].preds:
            nodes[node].preds.append(waited)
    return nodes
