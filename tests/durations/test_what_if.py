"""What-ifs on a whole job: what they touch, what they leave, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prismscale.cluster import Cluster, Measured, MeasuredCurve
from prismscale.cost.collective import AnalyticCollectiveModel, collective_model
from prismscale.durations.altered import Alteration
from prismscale.durations.recosting import CostSettings
from prismscale.durations.scenario import Scenario
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.durations.what_if.effects import Effect
from prismscale.errors import FormatError, UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.sim.hoped import HopedJob, hoped_job
from prismscale.sim.retime import retime
from support.jobs import pipeline_job

H100 = Cluster.load("h100-sxm")
TP = 2
MEMBERS = np.arange(TP)[:, np.newaxis]
"""Of a tensor-parallel group, on one node."""


def job(measured: bool = False) -> JobGraph:
    """Two stages, eight replicas, two tensor-parallel ranks: a stage lies on two nodes, and so do
    its replicas. Communication is modelled unless it was ``measured``."""
    graph = pipeline_job(2, 8, TP, 4)
    if measured:
        return graph
    classes = []
    for rank_class in graph.classes:
        trace = rank_class.trace
        own_ns = np.where(trace.computes_B, trace.body_ns_SB, 0)
        classes.append(replace(rank_class, trace=replace(trace, body_ns_SB=own_ns)))
    return replace(graph, classes=tuple(classes))


def hoped(*what_ifs: str, graph: JobGraph | None = None, **scenario: object) -> HopedJob:
    """The job with what-ifs."""
    given = Scenario(cluster=H100, what_ifs=what_ifs, **scenario)  # type: ignore[arg-type]
    return hoped_job(graph or job(), Alteration(scenario=given, root=Path()))


def step_ns(found: HopedJob) -> int:
    """Its step."""
    return retime(found.durations).step_ns


def effect(*what_ifs: str, **given: object) -> Effect:
    """What the one what-if touches."""
    (found,) = hoped(*what_ifs, **given).effects  # type: ignore[arg-type]
    return found


def of_group(found: HopedJob, name: str) -> set[int]:
    """Durations of a group's communications, in the first class."""
    trace = found.durations.graph.classes[0].trace
    body = found.durations.body(0, 0)
    return {
        int(np.max(body[n - trace.n_prologue]))
        for n in trace.communications(trace.n_prologue, trace.n_nodes)
        if trace.groups[int(trace.group_index_N[n])].name == name
    }


def test_a_faster_link_is_a_cluster_with_that_link() -> None:
    """To the nanosecond, on every communication."""
    faster = replace(
        H100,
        intra_node=replace(
            H100.intra_node, bandwidth_bytes_per_s=2 * H100.intra_node.bandwidth_bytes_per_s
        ),
    )
    graph = job()
    given = Scenario(cluster=faster).durations(graph)
    found = hoped("link=nvlink x2").durations
    for rank_class in graph.classes:
        assert given.body(rank_class.index, 0) == found.body(rank_class.index, 0)


def test_a_group_on_the_network_has_a_node_for_each_member() -> None:
    """And on NVLink all of them on one."""
    model = AnalyticCollectiveModel(H100)
    apart, together = (
        int(model.duration_ns(CollectiveOp.ALL_REDUCE, 100_000, ranks)[0])
        for ranks in (MEMBERS * H100.devices_per_node, MEMBERS)
    )
    assert of_group(hoped(), "tp") == {together}
    assert of_group(hoped("group=tp on network"), "tp") == {apart}
    assert apart > together


def test_a_group_is_moved_alone() -> None:
    """Others keep their links."""
    before, after = hoped(), hoped("group=tp on network")
    assert of_group(before, "dp") == of_group(after, "dp")
    assert of_group(before, "pp") == of_group(after, "pp")


def test_a_message_goes_over_the_link_that_it_is_put_on() -> None:
    """Stages lie on nodes of their own; beside each other they talk faster."""
    assert max(of_group(hoped("group=pp on nvlink"), "pp")) < max(of_group(hoped(), "pp"))


def test_a_phase_of_a_measured_program_takes_as_long_as_hoped() -> None:
    """All computation of that label, in the prologue too, and nothing else."""
    before, after = hoped().durations, hoped("kernel=forward x0.5").durations
    trace = before.graph.classes[0].trace
    pairs = zip(before.body(0, 0), after.body(0, 0), trace.computes_B.tolist(), strict=True)
    labels = [trace.labels[n] for n in trace.label_N[trace.n_prologue :].tolist()]
    for (was, then, computes), label in zip(pairs, labels, strict=True):
        is_meant = computes and label == "forward"
        assert np.all(np.asarray(then) == np.asarray(was) * (0.5 if is_meant else 1))


def test_what_ifs_hold_together() -> None:
    """Each does what it does alone, and the step says so."""
    both = hoped("kernel=backward x0.5", "link=nvlink x4")
    assert step_ns(both) < min(step_ns(hoped("kernel=backward x0.5")), step_ns(hoped()))
    assert [e.text for e in both.effects] == ["kernel=backward x0.5", "link=nvlink x4"]
    assert both.step_without_ns == step_ns(hoped())


def test_an_effect_says_what_and_how_much_of_the_step() -> None:
    """Four microbatches of two blocks, forward: of 10 µs each."""
    found = effect("kernel=forward x0.5")
    assert (found.count, found.touches) == (8, "forward 8 computations a step")
    assert found.share == pytest.approx(8 * 10_000 / step_ns(hoped()))


def test_an_effect_of_some_ranks_says_on_how_many() -> None:
    """Half of the ranks send forward, and the other half back."""
    graph = job()
    last = graph.classes[-1]
    trace = last.trace
    names = tuple("head" if label == "optimizer" else label for label in trace.labels)
    classes = (*graph.classes[:-1], replace(last, trace=replace(trace, labels=names)))
    found = effect("kernel=head x2", graph=replace(graph, classes=classes))
    assert found.touches == f"head 1 computations a step on {last.size} of {graph.world_size} ranks"


def test_communication_that_waits_is_touched_by_its_links_only() -> None:
    """Every one of a tensor-parallel group is in the way already."""
    assert effect("link=nvlink x2").touches.startswith("tp 16")
    with pytest.raises(UsageError, match="block computation already"):
        hoped("overlap=tp off")


def test_a_send_that_nobody_waits_for_is_in_no_ones_way() -> None:
    """Each of the four sends; what is received is waited for anyway."""
    found = effect("overlap=pp off")
    assert (found.count, found.touches.startswith("pp 4 ")) == (4, True)


@pytest.mark.parametrize(
    ("what_if", "told"),
    [
        ("kernel=attention.* x0.5", "it is called backward, forward, launch"),
        ("overlap=mesh_dp off", "there are dp, pp, tp"),
        ("group=ep on network", "there are dp, pp, tp"),
        ("group=tp on nvlink", "nvlink (intra_node, 450.0 GB/s): dp, tp; network"),
        ("dtype=fp8", "run the program with --device null"),
        ("host=x2", "run the program with --device null"),
        ("recompute=off", "run the program with --device null"),
        ("compute=shared", "measured beside the communication"),
    ],
)
def test_what_touches_nothing_is_refused_with_what_there_is(what_if: str, told: str) -> None:
    """Names of this job."""
    with pytest.raises(UsageError) as refused:
        hoped(what_if)
    assert told in str(refused.value)


def test_measured_communication_keeps_its_time() -> None:
    """A model has nothing to say of it."""
    with pytest.raises(UsageError, match="no communication that is modelled"):
        hoped("link=nvlink x2", graph=job(measured=True))
    with pytest.raises(UsageError, match="or were measured"):
        hoped("group=tp on network", graph=job(measured=True))


def test_a_group_that_no_node_holds_does_not_go_over_nvlink() -> None:
    """Sixteen members, eight devices."""
    graph = pipeline_job(1, 16, 1, 2)
    with pytest.raises(UsageError, match="groups of 16 do not fit the 8 GPUs"):
        hoped("group=dp on nvlink", graph=graph)


def test_a_group_that_two_what_ifs_place_is_refused() -> None:
    """By its name, and by a pattern."""
    with pytest.raises(UsageError, match="both place group 'tp'"):
        hoped("group=tp on network", "group=t. on nvlink")


def test_without_what_ifs_the_graph_is_the_runs_own() -> None:
    """Not even a copy."""
    graph = job()
    assert hoped(graph=graph).durations.graph is graph
    assert hoped(graph=graph).step_without_ns is None


def test_measured_times_scale_with_what_a_model_makes_of_the_links() -> None:
    """Links do not explain what was measured; they say how it would change."""
    curve = MeasuredCurve(
        op=CollectiveOp.ALL_REDUCE, group_size=TP, n_bytes=(1, 10**8), time_ns=(50_000.0, 1e6)
    )
    told = Measured(machine="a node", date="2026-01-01", curves=(curve,))
    cluster = replace(H100, measured=told)
    asked = (CollectiveOp.ALL_REDUCE, 10**8, MEMBERS)
    as_it_is, halved = (
        WhatIfs.parse(texts).communication(cluster).duration_ns(*asked)[0]
        for texts in ((), ("link=nvlink x0.5",))
    )
    slower = WhatIfs.parse(("link=nvlink x0.5",)).cluster(H100)
    ratio = (
        collective_model(slower).duration_ns(*asked)[0]
        / collective_model(H100).duration_ns(*asked)[0]
    )
    assert as_it_is == 1_000_000
    assert halved == pytest.approx(as_it_is * ratio, rel=1e-6)
    assert ratio > 1.5


def test_a_scenario_keeps_its_what_ifs(tmp_path: Path) -> None:
    """In the run folder, for every command; a file of before has none."""
    kept = Scenario(cluster=H100, what_ifs=("link=nvlink x2", "overlap=tp off"))
    kept.save(tmp_path / "scenario.json")
    assert Scenario.load(tmp_path / "scenario.json") == kept
    text = (tmp_path / "scenario.json").read_text()
    (tmp_path / "old.json").write_text(text.replace('"what_ifs"', '"something"'))
    assert Scenario.load(tmp_path / "old.json").what_ifs == ()


def test_a_scenario_with_a_damaged_what_if_is_refused(tmp_path: Path) -> None:
    """As any other part of the file."""
    Scenario(cluster=H100, what_ifs=("link=nvlink x2",)).save(tmp_path / "scenario.json")
    text = (tmp_path / "scenario.json").read_text()
    (tmp_path / "scenario.json").write_text(text.replace("nvlink x2", "nvlink x-2"))
    with pytest.raises(FormatError, match="above 0"):
        Scenario.load(tmp_path / "scenario.json")


def test_kernels_of_a_null_run_need_its_logs(tmp_path: Path) -> None:
    """Without them, another capture is asked for."""
    costs = CostSettings()
    scenario = Scenario(cluster=H100, kernel_costs=costs, what_ifs=("kernel=mm x2",))
    with pytest.raises(UsageError, match=r"launches-\d+\.parquet is missing"):
        hoped_job(job(), Alteration(scenario=scenario, root=tmp_path))


def test_measured_kernels_do_not_depend_on_the_cluster() -> None:
    """Modelled ones do."""
    h200 = Cluster.load("h200-sxm")
    measured = Scenario(cluster=H100)
    assert measured.costs_kernels_as(replace(measured, cluster=h200))
    modelled = Scenario(cluster=H100, kernel_costs=CostSettings())
    assert not modelled.costs_kernels_as(replace(modelled, cluster=h200))
