"""Flows that share links: what each takes beside the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.sim.fair_sharing import Flow, max_min_shares, shared_ns

CARD = {"network out": 1.0}


def flow(lane: int, start_ns: int, alone_ns: int, use: dict[str, float]) -> Flow:
    return Flow(lane=lane, start_ns=start_ns, alone_ns=alone_ns, use=use)


def test_two_equal_flows_take_twice_as_long() -> None:
    """Each has half of the card all the time."""
    assert shared_ns([flow(n, 0, 100, CARD) for n in range(2)]) == [200, 200]


def test_only_the_time_together_is_shared() -> None:
    """Half of each flow is alone: 50 of the first, then 100 for 50 of both, then the rest."""
    assert shared_ns([flow(0, 0, 100, CARD), flow(1, 50, 100, CARD)]) == [150, 150]


def test_flows_one_after_another_take_what_they_take_alone() -> None:
    """The end of one is the beginning of the next."""
    assert shared_ns([flow(0, 0, 100, CARD), flow(1, 100, 100, CARD)]) == [100, 100]


def test_directions_do_not_disturb_each_other() -> None:
    """What is sent and what is received at the same time."""
    both = [flow(0, 0, 100, {"network out": 1.0}), flow(1, 0, 100, {"network in": 1.0})]
    assert shared_ns(both) == [100, 100]


def test_who_asks_for_little_is_not_slowed() -> None:
    """A flow of latency beside one of bandwidth, which gets the rest."""
    little, much = shared_ns([flow(0, 0, 100, {"network out": 0.2}), flow(1, 0, 100, CARD)])
    assert little == 100
    assert much == pytest.approx(100 + 100 - 80)


def test_a_lane_that_is_busy_holds_back_its_next_flow() -> None:
    """The second of lane 0 begins when the first ends, late because of lane 1, and takes as long
    as alone: by then lane 1 has ended."""
    found = shared_ns([flow(0, 0, 100, CARD), flow(0, 100, 100, CARD), flow(1, 0, 100, CARD)])
    assert found == [200, 100, 200]


def test_the_tightest_link_sets_the_pace() -> None:
    """NVLink is free for it, the card is not."""
    use = {"nvlink out": 0.4, "network out": 1.0}
    assert shared_ns([flow(0, 0, 100, use), flow(1, 0, 100, CARD)])[0] == 200


def test_times_of_a_long_run_are_as_exact() -> None:
    """An hour after the start, where doubles are coarse."""
    hour = 3_600 * 10**9
    found = shared_ns([flow(n, hour, 100, CARD) for n in range(3)])
    assert found == pytest.approx([300] * 3, rel=1e-2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_max_min_shares_are_fair(asked: list[float]) -> None:
    """Nobody gets more than asked for, the link is full unless all are served, and who is not
    served gets as much as anybody."""
    got = max_min_shares(asked)
    assert all(g <= a for g, a in zip(got, asked, strict=True))
    assert sum(got) == pytest.approx(min(1.0, sum(asked)))
    unserved = [g for g, a in zip(got, asked, strict=True) if g < a - 1e-9]
    assert all(g >= max(got) - 1e-9 for g in unserved)


@st.composite
def flows(draw: st.DrawFn) -> list[Flow]:
    """Of up to three lanes, on two links."""
    shares = st.floats(0.05, 1)
    found = []
    for lane in range(draw(st.integers(1, 3))):
        start_ns = 0
        for _ in range(draw(st.integers(1, 4))):
            start_ns += draw(st.integers(0, 300))
            use = {link: draw(shares) for link in draw(st.sets(st.sampled_from("ab"), min_size=1))}
            alone_ns = draw(st.integers(1, 300))
            found.append(flow(lane, start_ns, alone_ns, use))
    return found


@given(flows())
def test_no_flow_is_faster_than_alone_and_no_link_carries_more_than_it_can(
    given_flows: list[Flow],
) -> None:
    """The last end is no sooner than each link's whole work after the first start."""
    found = shared_ns(given_flows)
    assert all(ns >= t.alone_ns for ns, t in zip(found, given_flows, strict=True))
    for link in "ab":
        on_it = [t for t in given_flows if link in t.use]
        if on_it:
            work = sum(t.alone_ns * t.use[link] for t in on_it)
            lanes = {t.lane for t in given_flows}
            ends = [_end(given_flows, found, lane) for lane in lanes]
            assert max(ends) - min(t.start_ns for t in on_it) >= work - 1e-3


def _end(all_of_them: list[Flow], took_ns: list[float], lane: int) -> float:
    end = 0.0
    for t, ns in zip(all_of_them, took_ns, strict=True):
        if t.lane == lane:
            end = max(end, t.start_ns) + ns
    return end


def test_flows_of_a_lane_that_begin_together_run_in_their_order() -> None:
    """The first one shares the link with the other lane, the second has it alone at the end."""
    lane = [flow(0, 0, 100, CARD), flow(0, 0, 300, CARD)]
    assert shared_ns([*lane, flow(1, 0, 100, CARD)]) == [200, 300, 200]
