"""Computes how long flows take that share links.

A flow that is alone uses a constant share of the bandwidth of each of its links. While the flows in
progress together ask for more than a link has, the link is divided among them as evenly as their
demands allow (max-min fairness: D. Bertsekas, R. Gallager, "Data Networks", 1992, section 6.5.2). A
flow proceeds at the pace that its tightest link allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """One communication of a rank."""

    lane: int
    """Lane of the flow. Flows on one lane run one after the other."""
    start_ns: int
    """When the flow begins, unless its lane is still busy."""
    alone_ns: int
    """Duration if no other flow is in progress."""
    use: Mapping[str, float]
    """Share of bandwidth that the flow then takes of its links, 0 to 1, by link."""


def shared_ns(flows: Sequence[Flow]) -> list[float]:
    """Return the duration of each flow beside the others; never less than alone.

    Args:
        flows: flows of one rank; those of a lane in the order in which they begin.
    """
    # The last is taken first; of flows that begin together the first one.
    waiting = sorted(range(len(flows)), key=lambda i: (flows[i].start_ns, i), reverse=True)
    left_ns = [float(t.alone_ns) for t in flows]
    began_ns = [0.0] * len(flows)
    ended_ns = [0.0] * len(flows)
    running: dict[int, int] = {}
    """Index of the running flow, by lane."""
    held: dict[int, list[int]] = {}
    """Flows that are due but whose lane is busy, by lane."""
    now = 0.0
    while waiting or running:
        lanes, paces = list(running), _paces([flows[i].use for i in running.values()])
        ends = [
            now + left_ns[running[lane]] / pace for lane, pace in zip(lanes, paces, strict=True)
        ]
        begins = float(flows[waiting[-1]].start_ns) if waiting else float("inf")
        then = min(begins, *ends) if ends else begins
        for lane, pace, end in zip(lanes, paces, ends, strict=True):
            left_ns[running[lane]] -= (then - now) * pace
            # Decided by its end, not by the time left, of which rounding may leave some.
            if end <= then:
                ended_ns[running.pop(lane)] = then
        now = then
        while waiting and flows[waiting[-1]].start_ns <= now:
            i = waiting.pop()
            held.setdefault(flows[i].lane, []).append(i)
        for lane in [lane for lane in held if lane not in running]:
            i = held[lane].pop(0)
            began_ns[i], running[lane] = now, i
            if not held[lane]:
                del held[lane]
    return [
        max(end - begin, float(t.alone_ns))
        for end, begin, t in zip(ended_ns, began_ns, flows, strict=True)
    ]


def _paces(uses: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the pace of each of some concurrent flows; 1 is the pace of a flow alone."""
    if len(uses) == 1:
        return [1.0]
    paces = [1.0] * len(uses)
    for link in {link for use in uses for link in use}:
        asked = [use.get(link, 0.0) for use in uses]
        for i, (want, got) in enumerate(zip(asked, max_min_shares(asked), strict=True)):
            if want > 0.0:
                paces[i] = min(paces[i], got / want)
    return paces


def max_min_shares(asked: Sequence[float]) -> list[float]:
    """Divide a link of bandwidth 1: each gets what it asks for, or as much as any other gets."""
    got = [0.0] * len(asked)
    free = 1.0
    order = sorted(range(len(asked)), key=lambda i: asked[i])
    for served, i in enumerate(order):
        got[i] = min(asked[i], free / (len(asked) - served))
        free -= got[i]
    return got
