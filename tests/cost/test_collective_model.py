"""Time of communications: rooflines every model obeys, and agreement with known figures."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.cluster import AlgorithmTuning, Cluster, Fabric, Link, Measured, MeasuredCurve
from prismscale.cost.collective import (
    AnalyticCollectiveModel,
    CollectiveModel,
    NullCollectiveModel,
    TableCollectiveModel,
    collective_model,
)
from prismscale.cost.topology import PlacementCache, TopologyFootprint, place
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp

H100 = Cluster.load("h100-sxm")
MODEL = AnalyticCollectiveModel(H100)
ANALYTIC_PRESETS = ["a100-80g", "b200", "h100-sxm", "h200-sxm"]
COLLECTIVES = [op for op in CollectiveOp if not op.is_p2p]
EIGHT = TopologyFootprint(size=8, nodes=1, most=8, least=8)
MIB, GIB = 2**20, 2**30


@st.composite
def placements(draw: st.DrawFn) -> TopologyFootprint:
    """Groups of up to 64 nodes, evenly or unevenly filled."""
    nodes = draw(st.integers(1, 64))
    least = draw(st.integers(1, 8))
    most = least if nodes == 1 else draw(st.integers(least, 8))
    extra = 0 if nodes == 1 else draw(st.integers(0, (nodes - 2) * (most - least)))
    size = least if nodes == 1 else least * (nodes - 1) + most + extra
    return TopologyFootprint(size=size, nodes=nodes, most=most, least=least)


ops = st.sampled_from(list(CollectiveOp))
sizes = st.integers(0, 2**36)


@given(ops, placements(), sizes, sizes, st.sampled_from(ANALYTIC_PRESETS))
def test_time_is_monotone_in_bytes(
    op: CollectiveOp, at: TopologyFootprint, first: int, second: int, preset: str
) -> None:
    """A larger message never takes less time, and none takes negative time."""
    model = AnalyticCollectiveModel(Cluster.load(preset))
    small, large = sorted((first, second))

    assert 0 <= model.time_ns(op, small, at) <= model.time_ns(op, large, at)


@given(ops, placements(), sizes, st.floats(1, 100), st.booleans())
def test_more_bandwidth_is_never_slower(
    op: CollectiveOp, at: TopologyFootprint, n_bytes: int, factor: float, is_intra: bool
) -> None:
    """Raising either link's bandwidth helps or changes nothing."""
    link = H100.intra_node if is_intra else H100.inter_node
    faster = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
    cluster = replace(H100, intra_node=faster) if is_intra else replace(H100, inter_node=faster)
    upgraded = AnalyticCollectiveModel(cluster)

    assert upgraded.time_ns(op, n_bytes, at) <= MODEL.time_ns(op, n_bytes, at)


@given(st.permutations(range(12)), ops, sizes)
def test_time_does_not_depend_on_the_order_of_members(
    order: list[int], op: CollectiveOp, n_bytes: int
) -> None:
    """Only where members sit matters."""
    straight = np.arange(12).reshape(12, 1)
    shuffled = np.array(order).reshape(12, 1)

    assert MODEL.duration_ns(op, n_bytes, shuffled) == MODEL.duration_ns(op, n_bytes, straight)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True))
def test_placement_counts_members_by_node(ranks: list[int]) -> None:
    """The vectorised placement equals a count by hand."""
    counts = np.unique(np.array(ranks) // 8, return_counts=True)[1]

    (at,), _ = place(np.array(ranks).reshape(-1, 1), 8)

    assert at == TopologyFootprint(
        size=len(ranks), nodes=len(counts), most=int(counts.max()), least=int(counts.min())
    )


def test_groups_of_one_family_are_answered_at_once() -> None:
    """Groups inside and across nodes get their own times, in order."""
    ranks_KG = np.array([[0, 0, 8], [1, 8, 9]])

    inside, across, inside_too = MODEL.duration_ns(CollectiveOp.ALL_REDUCE, 64 * MIB, ranks_KG)

    assert inside == inside_too < across


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_group_of_one_takes_no_time(op: CollectiveOp) -> None:
    """There is nobody to talk to."""
    assert MODEL.duration_ns(op, GIB, np.array([[5]])).tolist() == [0]


def test_family_without_groups_gives_no_durations() -> None:
    """An empty family is no error."""
    assert MODEL.duration_ns(CollectiveOp.ALL_REDUCE, 8, np.zeros((4, 0), int)).shape == (0,)


def test_equal_tables_at_reused_addresses_are_not_confused() -> None:
    """The cache holds on to its keys, so a new table never inherits an old one's placement."""
    cache = PlacementCache(8)

    for node in range(50):
        (at,), _ = cache.of(np.array([[0], [8 * node + 1]]))
        assert at.nodes == (1 if node == 0 else 2)


@pytest.mark.parametrize("measured", [False, True])
def test_a_used_model_goes_to_another_process(measured: bool) -> None:
    """Durations are drawn in several processes, with the model that answers for them."""
    model: CollectiveModel = MODEL
    if measured:
        curve = MeasuredCurve(
            op=CollectiveOp.ALL_REDUCE, group_size=2, n_bytes=(8, 64), time_ns=(10, 20)
        )
        model = TableCollectiveModel(H100, Measured(machine="m", date="d", curves=(curve,)), MODEL)
    ranks_KG = np.arange(4).reshape(2, 2)
    before = model.duration_ns(CollectiveOp.ALL_REDUCE, 32, ranks_KG)
    after = pickle.loads(pickle.dumps(model)).duration_ns(CollectiveOp.ALL_REDUCE, 32, ranks_KG)
    assert before.tolist() == after.tolist()


def test_null_model_costs_nothing() -> None:
    """Without communication only computation and waiting are left."""
    ranks_KG = np.arange(16).reshape(8, 2)

    assert NullCollectiveModel().duration_ns(CollectiveOp.ALL_REDUCE, GIB, ranks_KG).sum() == 0


def sped_up(link: str, at: TopologyFootprint, op: CollectiveOp, n_bytes: int) -> float:
    """How much quicker a link of ten times the bandwidth makes a communication."""
    quick = getattr(H100, link)
    wide = replace(quick, bandwidth_bytes_per_s=10 * quick.bandwidth_bytes_per_s)
    model = AnalyticCollectiveModel(replace(H100, **{link: wide}))
    return MODEL.time_ns(op, n_bytes, at) / model.time_ns(op, n_bytes, at)


def test_switch_reduction_beats_the_ring_in_a_full_node() -> None:
    """Eight H100 reduce large vectors in the switch: quicker than by the ring alone."""
    ring = AnalyticCollectiveModel(replace(H100, algorithms={"ring": H100.algorithms["ring"]}))
    assert MODEL.time_ns(CollectiveOp.ALL_REDUCE, GIB, EIGHT) < 0.9 * ring.time_ns(
        CollectiveOp.ALL_REDUCE, GIB, EIGHT
    )
    assert sped_up("intra_node", EIGHT, CollectiveOp.ALL_REDUCE, GIB) > 5


def test_small_messages_are_bound_by_latency() -> None:
    """A few bytes cost steps and launch only."""
    at = TopologyFootprint(size=64, nodes=8, most=8, least=8)
    for link in ("intra_node", "inter_node"):
        assert sped_up(link, at, CollectiveOp.ALL_REDUCE, 64) < 1.05


def test_one_member_per_node_is_bound_by_the_network() -> None:
    """Data-parallel groups across nodes live on one card each."""
    at = TopologyFootprint(size=10, nodes=10, most=1, least=1)

    assert sped_up("inter_node", at, CollectiveOp.ALL_GATHER, GIB) > 5


@pytest.mark.parametrize(
    ("op", "n_bytes", "at", "measured_us"),
    [
        (CollectiveOp.ALL_REDUCE, GIB, EIGHT, 4001.3),
        (CollectiveOp.ALL_GATHER, GIB, EIGHT, 2722.3),
        (
            CollectiveOp.ALL_TO_ALL,
            GIB,
            TopologyFootprint(size=40, nodes=10, most=4, least=4),
            21521.0,
        ),
        (
            CollectiveOp.ALL_REDUCE,
            GIB,
            TopologyFootprint(size=10, nodes=10, most=1, least=1),
            39744.4,
        ),
    ],
)
def test_h100_agrees_with_public_measurements(
    op: CollectiveOp, n_bytes: int, at: TopologyFootprint, measured_us: float
) -> None:
    """nccl-tests times of xxrjun/nccl-tests-cluster (example-cluster01) within 5 %."""
    assert MODEL.time_ns(op, n_bytes, at) == pytest.approx(1e3 * measured_us, rel=0.05)


def test_ring_time_is_the_textbook_formula() -> None:
    """2 (n-1) latencies and 2 (n-1)/n of the bytes, on a cluster without overheads."""
    plain = AlgorithmTuning(
        base_ns=0, latency_factor=1, intra_efficiency=1, inter_efficiency=1, chunk_ns=0,
        chunk_limit_ns=1,
    )  # fmt: skip
    link = Link(latency_ns=10, bandwidth_bytes_per_s=1e9)
    model = AnalyticCollectiveModel(replace(H100, intra_node=link, algorithms={"ring": plain}))

    assert model.time_ns(CollectiveOp.ALL_REDUCE, 8000, EIGHT) == 2 * 7 * 10 + 2 * 7 * 1000


def test_operation_without_an_algorithm_is_named() -> None:
    """A file that leaves an operation out says so when it is needed."""
    model = AnalyticCollectiveModel(replace(H100, algorithms={"ring": H100.algorithms["ring"]}))

    with pytest.raises(UsageError, match=r"no algorithm for all_to_all.*pairwise"):
        model.duration_ns(CollectiveOp.ALL_TO_ALL, 64, np.array([[0], [1]]))


def test_unknown_algorithm_is_refused() -> None:
    """A misspelt table in a cluster file is an error, not a silent loss."""
    with pytest.raises(UsageError, match=r"unknown algorithm 'rnig'.*did you mean ring"):
        AnalyticCollectiveModel(replace(H100, algorithms={"rnig": H100.algorithms["ring"]}))


def table(*times_ns: float) -> TableCollectiveModel:
    """All-reduce between two ranks, measured at 100, 10,000 and 1,000,000 bytes."""
    curve = MeasuredCurve(
        op=CollectiveOp.ALL_REDUCE, group_size=2, n_bytes=(100, 10_000, 1_000_000),
        time_ns=times_ns,
    )  # fmt: skip
    measured = Measured(machine="m", date="d", curves=(curve,))
    return TableCollectiveModel(H100, measured, NullCollectiveModel())


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(100, 1000), (1000, 2000), (10_000, 4000), (1, 1000), (3_000_000, 1_200_000)],
)
def test_table_interpolates_and_extrapolates_by_its_rule(n_bytes: int, expected: int) -> None:
    """Log-log between points, flat below, proportional above."""
    times = table(1000, 4000, 400_000).duration_ns(
        CollectiveOp.ALL_REDUCE, n_bytes, np.array([[0], [1]])
    )

    assert times.tolist() == [expected]


@given(st.integers(0, 10**8), st.integers(0, 10**8))
def test_table_is_monotone_whatever_was_measured(first: int, second: int) -> None:
    """Noise in a measurement does not make larger messages faster."""
    model, pair = table(4000, 3000, 5000), np.array([[0], [1]])
    small, large = (
        model.duration_ns(CollectiveOp.ALL_REDUCE, b, pair)[0] for b in sorted((first, second))
    )

    assert small <= large


def test_table_leaves_other_groups_to_the_fallback() -> None:
    """A group of three was not measured; neither was a pair across nodes."""
    model = table(1000, 4000, 400_000)

    for ranks in ([[0], [1], [2]], [[0], [8]]):
        assert model.duration_ns(CollectiveOp.ALL_REDUCE, 100, np.array(ranks)).tolist() == [0]


def test_measurements_are_preferred_where_a_cluster_has_them() -> None:
    """The loopback preset answers from its table, and analytically beyond it."""
    cluster = Cluster.load("loopback-gloo")
    model = collective_model(cluster)
    assert cluster.measured is not None
    curve = next(c for c in cluster.measured.curves if c.op == CollectiveOp.ALL_REDUCE)

    pair, four = np.array([[0], [1]]), np.array([[0], [1], [2], [3]])

    assert model.duration_ns(curve.op, curve.n_bytes[0], pair)[0] == round(curve.time_ns[0])
    assert model.duration_ns(curve.op, MIB, four)[0] > 0
    assert isinstance(collective_model(H100), AnalyticCollectiveModel)


def test_recv_takes_as_long_as_send() -> None:
    """Both ends of one message."""
    model = collective_model(Cluster.load("loopback-gloo"))
    pair = np.array([[0], [1]])

    send, recv = (model.duration_ns(op, MIB, pair) for op in (CollectiveOp.SEND, CollectiveOp.RECV))

    assert send == recv


def _pairs(n_nodes: int) -> np.ndarray:
    """A group of two nodes for each of the eight devices of a node: [group rank, group]."""
    return np.array([[device, 8 * (n_nodes - 1) + device] for device in range(8)]).T


def test_groups_of_a_family_share_the_cards_of_a_node() -> None:
    """Eight groups over nodes with four cards take as long as one with half a card."""
    few = replace(H100, nics_per_node=4)
    half = Link(
        latency_ns=H100.inter_node.latency_ns,
        bandwidth_bytes_per_s=H100.inter_node.bandwidth_bytes_per_s / 2,
    )
    alone = AnalyticCollectiveModel(replace(H100, inter_node=half))
    shared = AnalyticCollectiveModel(few).duration_ns(CollectiveOp.ALL_REDUCE, GIB, _pairs(2))

    assert shared == pytest.approx(
        alone.duration_ns(CollectiveOp.ALL_REDUCE, GIB, _pairs(2)), rel=1e-6
    )


def test_nodes_of_an_nvlink_domain_need_no_network() -> None:
    """A group of 72 takes as long, however slow the network is; the 73rd member waits for it."""
    own = Cluster.load("gb200")
    slow = replace(own, inter_node=replace(own.inter_node, bandwidth_bytes_per_s=1e6))

    def ns(cluster: Cluster, ranks: int) -> int:
        table = np.arange(ranks)[:, np.newaxis]
        model = AnalyticCollectiveModel(cluster)
        return int(model.duration_ns(CollectiveOp.ALL_REDUCE, 1 << 30, table)[0])

    assert ns(own, 72) == ns(slow, 72) < ns(own, 73) < ns(slow, 73)
    nodes = replace(own, nodes_per_nvlink_domain=1)
    assert ns(nodes, 4) == ns(own, 4)
    assert ns(nodes, 72) > 2 * ns(own, 72)


def test_a_group_alone_has_its_card_for_itself() -> None:
    """One group over the same nodes is as fast as where every device has a card."""
    few = AnalyticCollectiveModel(replace(H100, nics_per_node=4))
    one = _pairs(2)[:, :1]

    assert few.duration_ns(CollectiveOp.ALL_REDUCE, GIB, one) == MODEL.duration_ns(
        CollectiveOp.ALL_REDUCE, GIB, one
    )


@pytest.mark.parametrize(("nodes", "is_slower"), [(4, False), (5, True)])
def test_oversubscribed_uplinks_slow_what_leaves_a_pod(nodes: int, is_slower: bool) -> None:
    """An all-to-all of more nodes than a pod has is slower; within a pod nothing changes."""
    fabric = Fabric(nodes_per_pod=4, oversubscription=8.0)
    model = AnalyticCollectiveModel(replace(H100, fabric=fabric))
    ranks = np.arange(8 * nodes)[:, None]
    times = [m.duration_ns(CollectiveOp.ALL_TO_ALL, GIB, ranks)[0] for m in (MODEL, model)]

    assert (times[1] > times[0]) == is_slower


def test_a_ring_hardly_notices_oversubscribed_uplinks() -> None:
    """It leaves a pod once: eight rings of 16 nodes fit uplinks of a quarter of the cards."""
    model = AnalyticCollectiveModel(
        replace(H100, fabric=Fabric(nodes_per_pod=8, oversubscription=4.0))
    )
    ranks = np.arange(128).reshape(16, 8)

    assert np.array_equal(
        model.duration_ns(CollectiveOp.ALL_GATHER, GIB, ranks),
        MODEL.duration_ns(CollectiveOp.ALL_GATHER, GIB, ranks),
    )


@given(ops, st.integers(0, 2**34), st.integers(1, 8), st.floats(1, 16), st.floats(1, 16))
def test_a_thinner_fabric_is_never_faster(
    op: CollectiveOp, n_bytes: int, nodes_per_pod: int, first: float, second: float
) -> None:
    """More oversubscription never takes less time."""
    ranks = np.arange(2 if op.is_p2p else 96)[:, None] * (40 if op.is_p2p else 1)
    full, thin = (
        AnalyticCollectiveModel(
            replace(H100, fabric=Fabric(nodes_per_pod=nodes_per_pod, oversubscription=o))
        ).duration_ns(op, n_bytes, ranks)[0]
        for o in sorted((first, second))
    )

    assert full <= thin


def test_a_members_own_share_costs_a_copy() -> None:
    """Two members move half of what they gather over the link and copy the other half."""
    tuning = H100.algorithms["ring"]
    times = [
        AnalyticCollectiveModel(
            replace(H100, algorithms={"ring": replace(tuning, own_copy=own)})
        ).time_ns(
            CollectiveOp.ALL_GATHER, 64 * GIB, TopologyFootprint(size=2, nodes=1, most=2, least=2)
        )
        for own in (0.0, 1.0)
    ]

    assert times[1] == pytest.approx(2 * times[0], rel=0.01)
