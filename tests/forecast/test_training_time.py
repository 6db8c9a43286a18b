"""Days to train on machines that vary, fail, and are replaced."""

from dataclasses import replace

import numpy as np
import pytest

from prismscale.cluster import Cluster
from prismscale.durations.samples import StepSamples
from prismscale.durations.scenario import Scenario
from prismscale.durations.stored_events import EventFacts
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.fleet import FailingComponent, Fleet
from prismscale.forecast.recording import Changes, recording_of, recording_of_import
from prismscale.forecast.training import (
    TrainingPlan,
    best_interval_s,
    daly_interval_s,
    training_time,
    young_interval_s,
)
from prismscale.forecast.training_plan import Machines, training_plan
from prismscale.sim.event_cost import EventCost
from support.forecast_jobs import small_graph
from support.jobs import job_from_traces
from support.traces import joined_traces

H100 = Cluster.load("h100-sxm")


def steps(n=2_000, mean=1e9, std=5e7, seed=0):
    return np.rint(np.random.default_rng(seed).normal(mean, std, n)).astype(np.int64)


def test_nothing_fails_without_a_failure_rate():
    """Without failures the days are the sum of the steps."""
    found = training_time(steps(), TrainingPlan(steps=86_400))
    assert found.days(0.5) == pytest.approx(1.0, rel=1e-2)
    assert not found.failures_D.any()


def test_expected_time_with_failures_matches_the_formula():
    """Mean completion time of restarted segments is (M + R) (e^(L/M) - 1) each (Daly, eq. 13 form,
    with the restart itself exposed to failures)."""
    plan = TrainingPlan(
        steps=864_000,
        nodes=100,
        fleet=Fleet.of_mtbf(1_000),
        checkpoint_s=120,
        restart_s=300,
        interval_s=3_600,
    )
    found = training_time(np.full(10, 10**9), plan, draws=4_000)
    mtbf, length = plan.job_mtbf_s, 3_600 + 120
    fail, again = 1 - np.exp(-length / mtbf), length + 300
    lost_first = mtbf - length * np.exp(-length / mtbf) / fail
    fail_again = 1 - np.exp(-again / mtbf)
    lost_again = mtbf - again * np.exp(-again / mtbf) / fail_again
    retries = fail_again / (1 - fail_again)
    each = length + fail * (lost_first + retries * lost_again + 300)
    expected = (240 * each - 120) / 86_400
    assert found.days_D.mean() == pytest.approx(expected, rel=3e-3)


def test_daly_beats_other_intervals():
    """Simulated days are fewest at Daly's interval, against half and twice of it."""
    base = {"steps": 864_000, "nodes": 1_000, "fleet": Fleet.of_mtbf(20_000.0)}
    base["checkpoint_s"] = 300.0
    best = daly_interval_s(300.0, TrainingPlan(**base).job_mtbf_s)
    days = {
        factor: training_time(
            np.full(10, 10**9), TrainingPlan(**base, interval_s=best * factor)
        ).days_D.mean()
        for factor in (0.4, 1.0, 2.5)
    }
    assert min(days, key=days.get) == 1.0


def test_daly_is_near_young_for_cheap_checkpoints():
    """For checkpoints much cheaper than the time between failures both agree."""
    assert daly_interval_s(10, 1e6) == pytest.approx(young_interval_s(10, 1e6), rel=1e-2)


def test_the_best_interval_is_near_dalys():
    """Where Daly's assumptions hold, the simulated law agrees within its grid."""
    plan = TrainingPlan(
        steps=864_000, nodes=1_000, fleet=Fleet.of_mtbf(20_000.0), checkpoint_s=300.0, restart_s=300
    )
    best = best_interval_s(864_000.0, plan)
    assert best == pytest.approx(daly_interval_s(300.0, plan.job_mtbf_s), rel=0.5)


def test_parts_add_up_to_the_whole():
    """Steps, checkpoints, work done again, and being down."""
    plan = TrainingPlan(steps=864_000, nodes=100, fleet=Fleet.of_mtbf(1_000), replace_s=100)
    found = training_time(steps(), plan)
    parts = found.steps_D + found.checkpoints_D + found.redone_D + found.down_D
    np.testing.assert_allclose(parts, found.days_D)
    assert found.failures_D.mean() == pytest.approx(found.days_D.mean() * 2.4, rel=0.02)


def test_a_run_keeps_its_machines():
    """Runs that differ make trainings differ; steps that differ average out."""
    rng = np.random.default_rng(0)
    of_steps = rng.normal(1e9, 5e7, (500, 8))
    of_runs = rng.normal(1e9, 5e7, (500, 1)) + rng.normal(0, 5e7, (500, 8))
    spread = [
        training_time(np.rint(ns).astype(np.int64), TrainingPlan(steps=864_000)).days_D.std()
        for ns in (of_steps, of_runs)
    ]
    assert spread[0] < 0.05
    assert spread[1] == pytest.approx(0.5, rel=0.1)


def test_a_job_without_enough_spares_waits():
    """One spare, two days of repair, two failures a day: mostly waiting."""
    shared = {"steps": 864_000, "nodes": 100, "fleet": Fleet.of_mtbf(1_200), "repair_hours": 48.0}
    enough, one = (
        training_time(np.full(10, 10**9), TrainingPlan(**shared, spares=spares))
        for spares in (None, 1)
    )
    assert enough.down_D.mean() < 1
    # A node comes back every two days, and the job needs one for each failure.
    assert one.days_D.mean() == pytest.approx(2 * one.failures_D.mean(), rel=0.1)


def test_software_takes_no_node_out():
    """Its failures need no spare."""
    bugs = FailingComponent(per_1000_node_days=20.0, replaces_node=False)
    plan = TrainingPlan(
        steps=864_000, nodes=100, fleet=Fleet(name="ours", components={"software": bugs}), spares=1
    )
    assert training_time(steps(), plan).down_D.mean() < 1


def test_a_job_that_never_gets_on_is_refused():
    """It fails before it comes to its next checkpoint, again and again."""
    plan = TrainingPlan(steps=10**6, nodes=10**6, fleet=Fleet.of_mtbf(1_000), interval_s=3_600)
    with pytest.raises(UsageError, match="never finishes; checkpoint more often"):
        training_time(steps(), plan)


@pytest.mark.parametrize(("name", "hours"), [("llama3-405b", 3.1), ("rsc-1", 1.8), ("rsc-2", 5.0)])
def test_published_fleets_fail_as_often_as_published(name, hours):
    """On 16,384 GPUs: 419 times in 54 days; projected 1.8 hours; at RSC-2's rate."""
    fleet = Fleet.load(name)
    assert fleet.node_mtbf_hours / 2_048 == pytest.approx(hours, rel=0.02)
    assert fleet.sources


def test_a_fleet_is_named_or_read(tmp_path):
    """What it may be is listed; a file is checked."""
    with pytest.raises(UsageError, match=r"unknown fleet 'llama3'.*did you mean llama3-405b"):
        Fleet.load("llama3")
    (tmp_path / "ours.toml").write_text("[components.gpu]\nper_1000_node_days = -1\n")
    with pytest.raises(FormatError, match="per_1000_node_days is -1"):
        Fleet.load(str(tmp_path / "ours.toml"))
    (tmp_path / "ours.toml").write_text("[components.gpu]\nper_1000_node_days = 2\n")
    assert Fleet.load(str(tmp_path / "ours.toml")).node_mtbf_hours == 12_000


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"steps": 1, "spares": 0}, {"steps": 1, "restart_s": -1.0}]
)
def test_impossible_plans_are_refused(bad):
    """Numbers that mean nothing are named."""
    with pytest.raises(UsageError, match=r"must be|needs 1"):
        TrainingPlan(**bad)


@pytest.mark.parametrize("asked", [{"mtbf_hours": 100.0}, {"failures": "rsc-1"}])
def test_failures_of_an_unknown_number_of_machines_are_refused(asked):
    """An import does not say on how many it ran; given, the plan has that many."""
    samples = StepSamples.from_graph(small_graph())
    recording = recording_of_import(samples, Changes())
    with pytest.raises(UsageError, match=r"how many machines its 4 ranks ran.*--nodes"):
        training_plan(recording, Machines(**asked), steps=100)
    assert training_plan(recording, Machines(**asked, nodes=2), steps=100).plan.nodes == 2
    assert training_plan(recording, Machines(), steps=100).plan.fleet is None


@pytest.mark.parametrize(("interval_s", "left"), [(None, 0.2e9), (600.0, 0.0)])
def test_checkpoints_of_the_program_count_where_none_are_planned(interval_s, left):
    """Without failures and without an interval they come as often as the program writes them."""
    facts = EventFacts(numbers=(5, 10), every=5, site="", checkpoint_bytes=1)
    saves = EventCost(facts=facts, extra_ns=10**9, rate=0.2)
    graph = job_from_traces(joined_traces([10], [30]))
    recording = recording_of(Scenario(cluster=H100).durations(graph), Scenario(cluster=H100))
    asked = Machines(failures="none", interval_s=interval_s)
    plan = training_plan(replace(recording, events=(saves,)), asked, steps=100).plan
    assert plan.extra_ns == left
