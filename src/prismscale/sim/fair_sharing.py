"""Flows that share links: how long each takes beside the others.

A flow would use a share of the bandwidth of each of its links all the time. While the flows
in progress ask for more than a link has, the link is divided among them as evenly as what they ask
for allows (max-min fairness: D. Bertsekas, R. Gallager, "Data Networks", 1992, section 6.5.2). A
flow goes on at the pace that its tightest link allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """One communication of a rank."""

    lane: int
    """Flows of a lane follow each other."""
    start_ns: int
    """When it begins, unless its lane is still busy."""
    alone_ns: int
    """What it takes where nothing else moves."""
    use: Mapping[str, float]
    """Share of its links' bandwidth that it takes then, 0 to 1, by link."""


def shared_ns(flows: Sequence[Flow]) -> list[float]:
    """What each flow takes beside the others; never less than alone.

    Args:
        flows: of one rank, those of a lane in the order in which they begin.
    """
    waiting = sorted(range(len(flows)), key=lambda i: flows[i].start_ns, reverse=True)
    left_ns = [float(t.alone_ns) for t in flows]
    began_ns = [0.0] * len(flows)
    ended_ns = [0.0] * len(flows)
    running: dict[int, int] = {}
    """By lane."""
    held: dict[int, list[int]] = {}
    """Flows whose time has come and whose lane is busy, by lane."""
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
            # By its end, not by what is left: of that, rounding leaves some.
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
    """How fast each of some flows goes on, 1 as if alone."""
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
    """What each gets of a link of bandwidth 1: as much as it asks for, or as much as whoever gets
    most."""
    got = [0.0] * len(asked)
    free = 1.0
    order = sorted(range(len(asked)), key=lambda i: asked[i])
    for served, i in enumerate(order):
        got[i] = min(asked[i], free / (len(asked) - served))
        free -= got[i]
    return got
