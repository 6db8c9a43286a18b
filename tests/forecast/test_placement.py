"""Nodes of unequal speed on stages and replicas."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.cluster import Cluster, Device
from prismscale.cost.collective import NullCollectiveModel
from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.faults import Faults
from prismscale.durations.scenario import Scenario
from prismscale.durations.slow_ranks import slow_lines, slow_ranks
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.draws.quotient import quotient_of
from prismscale.forecast.draws.sampling import DistributionDraws
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.forecast.placement.node_placement import (
    Evaluator,
    NodePlacement,
    count_placements,
    different_placements,
    hot_node_study,
    place,
)
from prismscale.forecast.placement.nodes import (
    ClusterNode,
    nodes_of_profile,
    read_nodes,
    read_sniff_test,
)
from prismscale.forecast.placement.placed_job import (
    keeps_nodes_whole,
    node_slots,
    ranks_of_a_node,
)
from prismscale.forecast.placement.placed_steps import PlacedSteps
from prismscale.forecast.recording import recording_of
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.pipeline import pipeline_places
from prismscale.sim.retime import retime
from prismscale.validation.synthetic_job import Layout, PassCosts, build_layout, median_durations
from support.jobs import job_from_traces, pipeline_job

PP, DP = 3, 2
NODE_SLOTS = [(stage * DP + replica,) for replica in range(DP) for stage in range(PP)]
REPLICAS = [replica for replica in range(DP) for _ in range(PP)]
PROCESSORS = replace(
    Cluster.load("h100-sxm"), device=Device(name="CPU", memory_bytes=2**30), devices_per_node=65_536
)


@pytest.fixture(scope="module")
def source_for():
    """An unbalanced pipeline: the last stage has more work."""
    layout = Layout(tp=1, pp=PP, dp=DP, microbatches=4)
    costs = PassCosts(forward_ns=10**6, backward_ns=2 * 10**6, last_stage_ns=10**6)
    graph = build_layout(layout, costs)
    still = Variation(compute_cv=0.0, communication_cv=0.0)
    source = vary(graph, median_durations(graph, NullCollectiveModel()), still)

    def build(factor_R):
        distributions = DistributionDraws(
            graph=graph,
            distributions=source.distributions,
            distribution_CB=source.distribution_CB,
            factor_R=factor_R,
        )
        return distributions, None

    build.graph = graph
    return build


def evaluator(source_for, factors):
    nodes = [ClusterNode(name=f"n{i}", factor=f) for i, f in enumerate(factors)]
    return Evaluator(source_for.graph, source_for, NODE_SLOTS, nodes, draws=1), nodes


def test_a_slow_node_belongs_where_there_is_slack(source_for):
    """One slow node is kept away from the loaded last stage."""
    evaluate, nodes = evaluator(source_for, [1, 1, 1.3, 1, 1, 1])
    found = place(evaluate, nodes, REPLICAS)
    assert found.exhaustive
    node_slot = found.best.node_S.index(2)
    assert node_slot % PP < PP - 1
    assert found.gain > 1.1
    assert found.spread >= 0.08


def test_exhaustive_search_misses_nothing(source_for):
    """The best of the placements that differ is the best of all of them."""
    factors = [1.0, 1.0, 1.1, 1.1, 1.25, 1.4]
    evaluate, nodes = evaluator(source_for, factors)
    best = place(evaluate, nodes, REPLICAS, exhaustive=True).best.step_ns
    assert best == min(evaluate(p).step_ns for p in itertools.permutations(range(6)))


def test_the_search_comes_near_the_optimum(source_for):
    """Annealing reaches 0.98 of the exhaustive optimum."""
    evaluate, nodes = evaluator(source_for, [1.3, 1.02, 1.1, 1.0, 1.05, 1.2])
    best = place(evaluate, nodes, REPLICAS, exhaustive=True).best.step_ns
    found = place(evaluate, nodes, REPLICAS, exhaustive=False, rounds=150).best.step_ns
    assert best / found >= 0.98


@pytest.mark.parametrize("exhaustive", [True, False])
def test_a_search_tells_how_far_it_is(source_for, exhaustive):
    """Ever more of what is to be tried, and never more than that."""
    evaluate, nodes = evaluator(source_for, [1, 1.1, 1.3, 1, 1, 1])
    told = []

    def note(done, total):
        told.append((done, total))

    place(evaluate, nodes, REPLICAS, rounds=20, exhaustive=exhaustive, progress=note)
    assert told == sorted(told)
    assert all(done <= total for done, total in told)
    assert told[-1][0] > 1


def test_spare_nodes_stand_in_for_slow_ones(source_for):
    """With one node too many, the slowest is left out."""
    evaluate, nodes = evaluator(source_for, [1.5, 1, 1, 1, 1, 1, 1])
    assert 0 not in place(evaluate, nodes, REPLICAS).best.node_S


class CountedOrder(tuple):
    """An order of nodes that counts how often it is gone through."""

    read = 0

    def __iter__(self):
        CountedOrder.read += 1
        return super().__iter__()


class EqualCosts:
    """Every placement takes the same step."""

    batch, tried = 2, 0

    def __init__(self, node_slots):
        self.node_slots = node_slots

    def many(self, placements):
        return [NodePlacement(node_S=CountedOrder(p), step_ns=1.0) for p in placements]


def test_setting_up_a_search_reads_each_order_few_times():
    """However many nodes there are."""
    nodes = [ClusterNode(name=str(i), factor=1.0 + i % 2) for i in range(600)]
    CountedOrder.read = 0
    place(EqualCosts([(s,) for s in range(500)]), nodes, [0] * 500, exhaustive=False, rounds=0)
    assert CountedOrder.read < 20


def test_placements_are_counted_up_to_symmetry():
    """One slow node among equal ones has as many places as a replica has node slots."""
    nodes = [ClusterNode(name=str(i), factor=1.0 + (i == 0)) for i in range(6)]
    assert len(list(different_placements(nodes, REPLICAS))) == PP
    assert count_placements(nodes, REPLICAS, 100) == PP


@given(
    factors=st.lists(st.sampled_from((1.0, 1.1, 1.3)), min_size=6, max_size=8),
    limit=st.integers(1, 50),
)
def test_placements_are_counted_as_they_are_tried(factors, limit):
    """Also where replicas are equal, and where one of several equal nodes is spare."""
    nodes = [ClusterNode(name=str(i), factor=factor) for i, factor in enumerate(factors)]
    tried = len(list(different_placements(nodes, REPLICAS)))
    assert count_placements(nodes, REPLICAS, limit) == min(tried, limit + 1)


def test_too_many_placements_are_not_all_tried(source_for):
    """Twelve different nodes on six node slots are 332,640 placements."""
    evaluate, nodes = evaluator(source_for, [1 + i / 100 for i in range(12)])
    with pytest.raises(UsageError, match="more than 200,000 different placements"):
        place(evaluate, nodes, REPLICAS, exhaustive=True)


def test_a_hot_node_costs_most_on_the_loaded_stage(source_for):
    """The study covers every node slot and factor, and ranks node slots as the load does."""
    evaluate, _ = evaluator(source_for, np.ones(6))
    found = hot_node_study(lambda rows: [evaluate.with_factors(r) for r in rows], 6, [1.1, 1.5])
    assert len(found) == 12
    by_slot = {h.node_slot: h.slowdown for h in found if h.factor == 1.5}
    assert max(by_slot, key=by_slot.get) % PP == PP - 1
    assert 0 < by_slot[0] < max(by_slot.values())


def test_nodes_are_read_by_factor_or_speed(tmp_path):
    """Speed is the inverse of the factor."""
    (tmp_path / "a.csv").write_text("node,speed\nx,0.5\ny,1\n")
    assert [n.factor for n in read_nodes(tmp_path / "a.csv")] == [2.0, 1.0]


def test_a_factor_beside_a_health_check_is_kept_as_it_is(tmp_path):
    """Seconds are held against the median of the nodes; factors are not."""
    (tmp_path / "a.csv").write_text("node,factor,seconds\nx,1.2,7\ny,1.4,8\n")
    assert [n.factor for n in read_nodes(tmp_path / "a.csv")] == [1.2, 1.4]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node,factor\nx,fast\n", "line 2: expected columns"),
        ("name,factor\nx,1\n", "line 2: expected columns"),
        ("node,factor\nx,1\ny,-1\n", "line 3: factor -1.0"),
        ("node,factor\nx,1\nx,1\n", "named twice: x"),
    ],
)
def test_bad_node_files_name_the_line(tmp_path, text, says):
    """What is wrong, and where."""
    (tmp_path / "n.csv").write_text(text)
    with pytest.raises(FormatError, match=says):
        read_nodes(tmp_path / "n.csv")


SNIFFED = """\
[2026-05-07 10:00:00] iteration 90 | lm loss 2.1
INFO:megatron:============================================================
INFO:megatron:  GPU sniff test -- iteration 100
INFO:megatron:  GEMM throughput (8192x8192x8192, bf16) [TFLOP/s/GPU]: median=700.00, mean=690.00, min=500.00, max=705.00
WARNING:megatron:    OUTLIER rank 9 (node-b): 500.00 (-28.6%)
INFO:megatron:  GEMM throughput (4096x4096x16384, bf16) [TFLOP/s/GPU]: median=600.00, mean=600.00, min=590.00, max=610.00
INFO:megatron:  All-reduce busbw (global PG, size=16, 268 MB) [GB/s]: median=300.00, mean=300.00, min=100.00, max=301.00
WARNING:megatron:    OUTLIER rank 2 (node-a): 100.00 (-66.7%)
INFO:megatron:  Result: OUTLIERS DETECTED
"""  # noqa: E501


def test_a_sniff_test_tells_slow_nodes(tmp_path):
    """By its matrix products, on average over them; bandwidths of groups are no device's speed."""
    log = tmp_path / "train.log"
    earlier = SNIFFED.replace("rank 9 (node-b)", "rank 1 (node-a)")
    log.write_text(earlier + SNIFFED)
    nodes = read_sniff_test(log, 16, 8)
    assert [n.name for n in nodes] == ["node of rank 0", "node-b"]
    assert [n.factor for n in nodes] == pytest.approx([1.0, (1.4 + 1.0) / 2])
    assert read_sniff_test(log, 8192, 8)[-1].factor == 1.0
    with pytest.raises(FormatError, match=r"line 14: rank 9 .* in a job of 8 ranks"):
        read_sniff_test(log, 8, 8)
    log.write_text("node,factor\na,1\n")
    assert read_sniff_test(log, 16, 8) is None


def test_a_log_with_bytes_that_are_no_text_is_read(tmp_path):
    """Programs print whatever they like between the lines that matter."""
    log = tmp_path / "train.log"
    log.write_bytes(b"loading \xff\xfe 100 %\n" + SNIFFED.encode())
    assert [n.name for n in read_sniff_test(log, 16, 8)] == ["node of rank 0", "node-b"]


def test_nodes_are_drawn_from_a_profile():
    """As slow as the slowest of their devices; the same seed gives the same nodes."""
    profile = VariabilityProfile.load("measured")
    nodes = nodes_of_profile(profile, 500, 8, seed=1)
    factors = np.array([n.factor for n in nodes])
    cv = profile.kernel("gemm").spatial_cv
    assert factors.mean() == pytest.approx(1 + 1.42 * cv, abs=0.002)
    assert nodes == nodes_of_profile(profile, 500, 8, seed=1)
    with pytest.raises(UsageError, match="do not differ"):
        nodes_of_profile(VariabilityProfile(name="even"), 2, 8)


def null_like_run(replicas=2):
    """A pipeline whose tensor-parallel ranks cannot differ, as on the null device."""
    graph = pipeline_job(3, replicas, 2, 4)
    scenario = Scenario(cluster=Cluster.load("h100-sxm"))
    recording = recording_of(scenario.durations(graph), scenario)
    return graph, scenario, recording


def test_many_placements_at_once_have_the_steps_of_slow_runs():
    """Each to the nanosecond what ``run --slow`` re-times, whole nodes of two ranks."""
    graph, scenario, recording = null_like_run()
    slots = [(r, r + 1) for r in range(0, 12, 2)]
    nodes = [ClusterNode(name=str(i), factor=f) for i, f in enumerate([1, 1.1, 1.3, 1, 1.2, 1])]
    small = quotient_of(recording.samples, recording.base, 8)
    rng = np.random.default_rng(0)
    placements = [rng.permutation(6).tolist() for _ in range(5)]
    for base, fused in ((small.base, small.fused), (recording.base, None)):
        costs = PlacedSteps(base, fused, slots, nodes)
        for placed in costs.many(placements):
            slow = {r: nodes[n].factor for s, n in enumerate(placed.node_S) for r in slots[s]}
            slowed = replace(scenario, faults=Faults(slow=slow))
            assert placed.step_ns == retime(slowed.durations(graph)).step_ns


def test_a_job_that_does_not_settle_has_steps():
    """Two loops that nothing joins: the mean over the longest cycle that is looked for."""
    builder = TraceBuilder(rank=0, world_size=1)
    builder.add_compute(1_001_000, preds=[-3])
    builder.add_compute(1_000_000, preds=[-2])
    builder.add_compute(100_000_000, preds=[1])
    graph = job_from_traces({0: builder.build()})
    scenario = Scenario(cluster=Cluster.load("h100-sxm"))
    recording = recording_of(scenario.durations(graph), scenario)
    costs = PlacedSteps(recording.base, None, [(0,)], [ClusterNode(name="a", factor=2.0)])

    (placed,) = costs.many([(0,)])

    assert placed.step_ns == pytest.approx(2_002_000, rel=0.01)


def test_searching_by_steps_comes_near_the_optimum():
    """Chains side by side reach 0.98 of the best of all."""
    _, _, recording = null_like_run()
    slots = [(r, r + 1) for r in range(0, 12, 2)]
    factors = [1.3, 1.02, 1.1, 1.0, 1.05, 1.2]
    nodes = [ClusterNode(name=str(i), factor=f) for i, f in enumerate(factors)]
    stage_R, replica_R = pipeline_places(recording.samples.graph)
    slots.sort(key=lambda slot: (replica_R[slot[0]], stage_R[slot[0]]))
    replicas = [int(replica_R[slot[0]]) for slot in slots]
    costs = PlacedSteps(recording.base, None, slots, nodes)
    best = place(costs, nodes, replicas, exhaustive=True).best.step_ns
    found = place(costs, nodes, replicas, exhaustive=False, rounds=100).best.step_ns
    assert best / found >= 0.98


def test_nodes_must_hold_whole_sets():
    """One rank of a tensor-parallel pair on another node: they cannot be drawn as one."""
    _, _, recording = null_like_run()
    small = quotient_of(recording.samples, recording.base, 8)
    nodes = [ClusterNode(name=str(i), factor=1.0) for i in range(12)]
    with pytest.raises(UsageError, match="drawn as one"):
        PlacedSteps(small.base, small.fused, [(r,) for r in range(12)], nodes)


@pytest.mark.parametrize(
    ("cluster", "ranks"), [(Cluster.load("h100-sxm"), 8), (PROCESSORS, 1), (None, 1)]
)
def test_a_node_hosts_as_many_ranks_as_the_clusters(cluster, ranks):
    """Of a captured job, too, and of a null run without its profile; else one."""
    _, _, recording = null_like_run(replicas=4)
    assert recording.modelled_job is None
    assert ranks_of_a_node(replace(recording, cluster=cluster)) == ranks


@pytest.mark.parametrize(("ranks", "whole"), [(4, False), (8, True), (12, False), (24, True)])
def test_slots_of_whole_nodes_keep_together_what_is_drawn_as_one(ranks, whole):
    """Twelve ranks are a node of eight and half of another."""
    _, _, recording = null_like_run(replicas=4)
    assert keeps_nodes_whole(recording, node_slots(recording.samples, ranks)) is whole


@pytest.mark.parametrize("ranks", [0, -1, 5])
def test_nodes_that_ranks_do_not_fill_are_refused(ranks):
    """A number that was given stands, 0 included; the message says what is allowed."""
    _, _, recording = null_like_run()
    assert ranks_of_a_node(recording, ranks) == ranks
    with pytest.raises(UsageError, match=f"nodes of {ranks}: --ranks-per-node must be 1 or more"):
        node_slots(recording.samples, ranks)


@pytest.mark.parametrize(
    ("texts", "found"),
    [(["17=1.3"], {17: 1.3}), (["2-4=1.5", "3=2"], {2: 1.5, 3: 2.0, 4: 1.5})],
)
def test_slow_ranks_are_named_or_ranged(texts, found):
    """Later ones rule."""
    assert slow_ranks(texts) == found


def test_slow_ranks_come_from_a_file(tmp_path):
    """As ``place`` writes it; a bad one says how to write it."""
    (tmp_path / "a.slow").write_text(slow_lines([(0, 1), (2, 3)], [1.25, 1.0]))
    assert slow_ranks([f"@{tmp_path / 'a.slow'}"]) == {0: 1.25, 1: 1.25, 2: 1.0, 3: 1.0}
    (tmp_path / "a.slow").write_text("@a.slow\n")
    for text, says in (
        (f"@{tmp_path / 'a.slow'}", "names another file"),
        (f"@{tmp_path / 'b.slow'}", "cannot be read"),
        ("7-3=1.2", "give RANK=FACTOR"),
        ("x=1", "give RANK=FACTOR"),
        ("0-999999999999999999=2", "ranks at most"),
        (f"{'9' * 5000}=2", "give RANK=FACTOR"),
    ):
        with pytest.raises(UsageError, match=says):
            slow_ranks([text])


def test_too_few_nodes_are_refused(source_for):
    """Every node slot needs a node."""
    with pytest.raises(UsageError, match="2 nodes for 6 node_slots"):
        evaluator(source_for, np.ones(2))


def test_thousands_of_seats_are_gone_through():
    """One slow node among equal replicas: every place is the same."""
    nodes = [ClusterNode(name=f"n{i}", factor=1.2 if i == 7 else 1.0) for i in range(3000)]
    (placed,) = different_placements(nodes, list(range(3000)))
    assert placed[-1] == 7
