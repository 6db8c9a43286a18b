"""Monte Carlo over the engine, distributions of nodes, and fused graphs."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import (
    Empirical,
    Gamma,
    LogNormal,
    Normal,
    ks_distance,
)
from prismscale.forecast.draws.lockstep import fuse
from prismscale.forecast.draws.montecarlo import Chunk, MonteCarlo, chunks_of, draw_steps
from prismscale.forecast.draws.sampling import (
    DistributionDraws,
    NodeDistribution,
    fuse_distributions,
)
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.sim.timeline import simulate
from prismscale.validation.goodness import ks_two_sample
from prismscale.validation.synthetic_job import (
    Layout,
    Move,
    PassCosts,
    build_layout,
    median_durations,
)
from support.fused_durations import FusedDurations
from support.jobs import job_from_traces, mesh_groups


def barrier_job(ranks):
    """Every rank computes, then all meet."""
    builder = TraceBuilder(rank=0, world_size=ranks)
    builder.add_compute(1, preds=[-1])
    builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[0])
    builder.add_compute(0, preds=[1])
    traces = {0: builder.build()}
    representative_R = np.zeros(ranks, dtype=np.int64)
    return assemble(traces, representative_R, collect_groups(traces, ranks, representative_R))


def distributions(graph, compute, communication=None):
    distribution_B = np.array([0, 1 if communication else -1, -1])
    table = (NodeDistribution(name="work", compute=compute),)
    if communication:
        table += (NodeDistribution(name="meet", communication=communication),)
    return DistributionDraws(graph=graph, distributions=table, distribution_CB=(distribution_B,))


def small_layout(weight_ns=0, **kwargs):
    layout = Layout(**{"tp": 4, "pp": 2, "dp": 3, "microbatches": 4, **kwargs})
    meet = (Move(CollectiveOp.ALL_REDUCE, 2**20),) * 3
    costs = PassCosts(
        forward_ns=900_000,
        backward_ns=1_800_000,
        optimizer_ns=100_000,
        forward_moves=meet,
        backward_moves=meet,
        weight_ns=weight_ns,
        boundary_bytes=2**20,
        step_moves=(Move(CollectiveOp.ALL_REDUCE, 2**20, "dp"),),
    )
    return build_layout(layout, costs)


def test_a_barrier_is_the_maximum_of_independent_draws():
    """100,000 draws of the slowest of 16 ranks follow F(x)^16."""
    graph, distribution = barrier_job(16), Normal(mean=1e9, std=5e7)
    config = MonteCarlo(draws=100_000, steps=1, memory_bytes=2**30)
    drawn = draw_steps(graph, distributions(graph, distribution), config).step_ns_D
    distance = stats.kstest(drawn, lambda x: distribution.cdf(x) ** 16).statistic
    assert distance < 1.63 / np.sqrt(100_000)


def test_serial_work_is_a_convolution():
    """The sum of two gamma durations on one rank is the gamma of the summed shapes."""
    builder = TraceBuilder(rank=0, world_size=1)
    builder.add_compute(1, preds=[-1])
    builder.add_compute(1, preds=[0])
    traces = {0: builder.build()}
    one = np.zeros(1, dtype=np.int64)
    graph = assemble(traces, one, collect_groups(traces, 1, one))
    table = (NodeDistribution(name="a", compute=Gamma(shape=4.0, scale=1e6)),)
    source = DistributionDraws(
        graph=graph, distributions=table, distribution_CB=(np.zeros(2, dtype=np.int64),)
    )
    drawn = draw_steps(graph, source, MonteCarlo(draws=100_000, steps=1)).step_ns_D
    assert ks_distance(Gamma(shape=8.0, scale=1e6), drawn) < 1.63 / np.sqrt(100_000)


def test_a_collective_is_drawn_once_for_all_members():
    """With still computation, the step varies exactly as one collective does, at any width."""
    graph = barrier_job(64)
    meet = LogNormal(mean_log=14.0, std_log=0.5)
    source = distributions(graph, Empirical(sorted_ns=np.array([1e6])), meet)
    drawn = draw_steps(graph, source, MonteCarlo(draws=20_000, steps=1)).step_ns_D - 1e6
    assert ks_distance(meet, drawn) < 0.015


def test_a_regime_slows_all_communication_of_a_step():
    """A state that holds a fifth of the steps and doubles communication doubles a fifth of it."""
    graph = barrier_job(4)
    still = Empirical(sorted_ns=np.array([1e6]))
    source = distributions(graph, still, still)
    slowed = replace(source.distributions[1], factor_K=np.array([1.0, 2.0]))
    source = replace(
        source, distributions=(source.distributions[0], slowed), regime_share_K=np.array([0.8, 0.2])
    )
    drawn = draw_steps(graph, source, MonteCarlo(draws=5_000, steps=1)).step_ns_D
    assert set(drawn.tolist()) == {2_000_000, 3_000_000}
    assert (drawn == 3_000_000).mean() == pytest.approx(0.2, abs=0.02)


def test_a_spatial_factor_persists():
    """One rank at 1.5 sets the step, whatever is drawn."""
    graph = barrier_job(4)
    source = distributions(graph, Normal(mean=1e6, std=1.0))
    slow = DistributionDraws(
        graph=graph,
        distributions=source.distributions,
        distribution_CB=source.distribution_CB,
        factor_R=np.array([1.0, 1.5, 1.0, 1.0]),
    )
    drawn = draw_steps(graph, slow, MonteCarlo(draws=100, steps=1)).step_ns_D
    assert drawn == pytest.approx(1.5e6, rel=1e-4)


def test_freezing_leaves_other_draws_alone():
    """Common random numbers: with the collective frozen, the computation's draws are unchanged."""
    graph = barrier_job(8)
    source = distributions(graph, Normal(mean=1e6, std=1e4), LogNormal(mean_log=10.0, std_log=1.0))
    config = MonteCarlo(draws=50, steps=1)
    frozen = draw_steps(graph, source.freeze(frozenset({1})), config).step_ns_D
    alone = draw_steps(graph, distributions(graph, Normal(mean=1e6, std=1e4)), config).step_ns_D
    assert len(set((frozen - alone).tolist())) == 1


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_fused_and_whole_graph_agree_to_the_nanosecond(pp):
    """Where chains end with the set's collective, fusing changes no step time of any draw."""
    graph = small_layout(pp=pp, microbatches=8)
    whole = RandomDurations(graph)
    fused = fuse(graph)
    a = simulate(graph, whole, steps=2, draws=3).job_step_ns_TD
    b = simulate(
        fused.graph, FusedDurations(fused=fused, origin=whole), steps=2, draws=3
    ).job_step_ns_TD
    assert (a == b).all()
    assert fused.graph.n_rank_nodes * 8 < graph.n_rank_nodes


def test_fused_steps_bound_the_whole_graphs_where_chains_end_in_computation():
    """Gradients of weights, behind which the set does not meet."""
    graph = small_layout(weight_ns=900_000)
    whole, fused = RandomDurations(graph), fuse(graph)
    a = simulate(graph, whole, steps=2, draws=3).job_step_ns_TD
    b = simulate(
        fused.graph, FusedDurations(fused=fused, origin=whole), steps=2, draws=3
    ).job_step_ns_TD
    assert (b >= a).all()


class RandomDurations:
    """Integers by member; what follows the last collective is the same for all."""

    def __init__(self, graph):
        self.graph = graph

    def prologue(self, class_index):
        return ()

    def body(self, class_index, step):
        rank_class = self.graph.classes[class_index]
        trace, out = rank_class.trace, []
        for node in range(trace.n_body):
            rng = np.random.default_rng((class_index, step, node))
            label = trace.labels[trace.label_N[node]]
            width = 1
            if label in ("forward", "backward", "weight"):
                width = rank_class.size
            elif label == "tp all_reduce":
                slot = rank_class.slots[trace.group_index_N[node]]
                width = self.graph.families[slot.family].n_groups
            out.append(rng.integers(0, 1000, (3, width)))
        return out


def test_fused_laws_give_the_whole_graphs_distribution():
    """Draws of the fused graph and of the whole one, where parallel groups share their draws,
    differ by sampling alone."""
    graph = small_layout(microbatches=2)
    model = AnalyticCollectiveModel(Cluster.load("h100-sxm"))
    source = vary(graph, median_durations(graph, model), Variation(compute_cv=0.1))
    fused = fuse(graph)
    config = MonteCarlo(draws=4_000, steps=1)
    a = draw_steps(graph, replace(source, once_G=fused.fused_group), config).step_ns_D
    b = draw_steps(fused.graph, fuse_distributions(fused, source), config).step_ns_D
    assert ks_two_sample(a, b) < 1.63 * np.sqrt(2 / 4_000)


def test_groups_that_meet_beside_the_computation_are_not_fused():
    """Two overlapped reductions: what a rank computes between them is nobody else's waiting."""
    builder = TraceBuilder(rank=0, world_size=8)
    first = builder.add_compute(5, preds=[-1])
    one = builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[first])
    second = builder.add_compute(5, preds=[first])
    two = builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[second])
    builder.add_compute(5, preds=[one, two])
    traces, same = {0: builder.build()}, np.zeros(8, dtype=np.int64)
    assert fuse(assemble(traces, same, collect_groups(traces, 8, same))) is None


def test_draws_repeat_and_seeds_differ():
    """The same seed gives the same draws; another one does not."""
    graph = barrier_job(4)
    source = distributions(graph, Normal(mean=1e6, std=1e4))
    a, b, c = (
        draw_steps(graph, source, MonteCarlo(draws=300, seed=s)).step_ns_D for s in (1, 1, 2)
    )
    assert (a == b).all()
    assert (a != c).any()


def test_streams_do_not_depend_on_the_order_of_asking():
    """A key's random numbers are its own."""
    chunk = Chunk(index=3, draws=1, seed=5)
    first = chunk.generator(1, 2).random(4)
    chunk.generator(1, 1).random(9)
    assert (chunk.generator(1, 2).random(4) == first).all()


def test_chunks_fit_the_budget_and_cover_all_draws():
    """Chunks are as large as the budget allows, and their draws add up."""
    chunks = chunks_of(MonteCarlo(draws=100, memory_bytes=3_000), 100)
    assert [c.draws for c in chunks] == [30, 30, 30, 10]
    with pytest.raises(UsageError, match="budget"):
        chunks_of(MonteCarlo(draws=1, memory_bytes=10), 100)


def test_progress_counts_draws():
    """The callback ends at all draws."""
    graph, seen = barrier_job(2), []
    draw_steps(
        graph,
        distributions(graph, Normal(mean=1e6, std=1e4)),
        MonteCarlo(draws=200),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(128, 200), (200, 200)]


def test_fused_messages_keep_their_tags():
    """The second stage takes them in another order than the first one sends them."""
    groups = mesh_groups(np.arange(4).reshape(2, 2), {"pp": 0, "tp": 1})
    traces = {}
    for rank in (0, 2):
        own = [g for g in groups if rank in g.ranks]
        pipe, tensor = ([g.name for g in own].index(name) for name in ("pp", "tp"))
        builder = TraceBuilder(rank=rank, world_size=4, groups=own)
        ready = builder.add_compute(1_000, preds=[-1])
        op, tags = (CollectiveOp.SEND, (0, 1)) if rank < 2 else (CollectiveOp.RECV, (1, 0))
        messages = [
            builder.add_communication(
                op, 8, group_index=pipe, peer=1, tag=tag, preds=[ready], lane=f"tag {tag}"
            )
            for tag in tags
        ]
        last = builder.add_compute(1_000, preds=messages)
        builder.add_communication(CollectiveOp.ALL_REDUCE, 8, group_index=tensor, preds=[last])
        traces[rank] = builder.build(known_groups=groups)

    fused = fuse(job_from_traces(traces)).graph

    assert fused.world_size == 2
    told = [c.trace.peer_N[c.trace.is_message_N] // 2 for c in fused.classes]
    assert [tags_N.tolist() for tags_N in told] == [[0, 1], [1, 0]]
