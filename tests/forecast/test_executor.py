"""Executors give the same results, in order."""

import multiprocessing
import operator
import os
import signal
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from prismscale.cost.collective import NullCollectiveModel
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import LocalProcesses, RayCluster, Serial, executor_named
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_each, draw_steps
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.validation.synthetic_job import Layout, PassCosts, build_layout, median_durations


def test_draws_do_not_depend_on_the_number_of_workers():
    """Serial, one and two processes: the same draws bit for bit."""
    costs = PassCosts(forward_ns=10**6, backward_ns=2 * 10**6)
    graph = build_layout(Layout(tp=1, pp=2, dp=2, microbatches=2), costs)
    source = vary(graph, median_durations(graph, NullCollectiveModel()), Variation())
    config = MonteCarlo(draws=300)
    drawn = [
        draw_steps(graph, source, config, executor=executor).step_ns_D
        for executor in (Serial(), LocalProcesses(workers=1), LocalProcesses(workers=2, worth_s=0))
    ]
    assert all(np.array_equal(drawn[0], other) for other in drawn[1:])


def test_sources_drawn_together_are_drawn_as_each_alone():
    """One list of tasks over all of them changes no draw; progress counts all draws."""
    costs = PassCosts(forward_ns=10**6, backward_ns=2 * 10**6)
    graph = build_layout(Layout(tp=1, pp=2, dp=2, microbatches=2), costs)
    median = median_durations(graph, NullCollectiveModel())
    sources = [vary(graph, median, Variation(compute_cv=cv)) for cv in (0.01, 0.1)]
    config = MonteCarlo(draws=200)
    told = []
    together = draw_each(
        graph,
        [(source, None) for source in sources],
        config,
        executor=LocalProcesses(workers=2, worth_s=0),
        progress=lambda done, total: told.append((done, total)),
    )
    for drawn, source in zip(together, sources, strict=True):
        alone = draw_steps(graph, source, config)
        assert np.array_equal(drawn.step_ns_D, alone.step_ns_D)
    assert told[-1] == (400, 400)


def test_results_keep_the_order_of_tasks():
    """Whoever finishes first, results come as asked."""
    tasks = list(range(20))
    found = list(LocalProcesses(workers=2, worth_s=0).map(operator.add, 100, tasks))
    assert found == [100 + t for t in tasks]


def test_processes_are_as_many_as_memory_takes(monkeypatch):
    """Where it takes no second one like this, all is done here."""
    full = SimpleNamespace(available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    found = list(LocalProcesses(workers=2, worth_s=0).map(_process_of, None, range(3)))
    assert found == [os.getpid()] * 3


def _process_of(shared, task):
    return os.getpid()


def test_who_stops_early_waits_for_no_task():
    """Tasks of an hour end with whoever asked for them, as at Ctrl-C."""
    results = LocalProcesses(workers=2, worth_s=0).map(
        signal.sigtimedwait, {signal.SIGUSR1}, [0, 0, 3600, 3600]
    )
    assert [next(results), next(results)] == [None, None]
    results.close()
    assert multiprocessing.active_children() == []


def test_an_error_in_a_worker_reaches_the_caller():
    """The exception itself, and no process is left waiting."""
    with pytest.raises(ZeroDivisionError):
        list(LocalProcesses(workers=2, worth_s=0).map(operator.truediv, 1, [1, 2, 0, 4]))


def test_ray_that_is_missing_is_explained(monkeypatch):
    """Without Ray the message says how to install it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'prismscale\[ray\]'"):
        list(RayCluster().map(operator.add, 1, [1]))


def test_executors_by_name():
    """Names of the command line; others are refused."""
    assert executor_named("local", workers=3) == LocalProcesses(workers=3)
    assert executor_named("ray", address="auto") == RayCluster(address="auto")
    with pytest.raises(UsageError, match="allowed: local, ray, serial"):
        executor_named("dask")
    with pytest.raises(UsageError, match="at least 1"):
        LocalProcesses(workers=0)
