"""Which ranks are timed together, and whose durations they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from prismscale.capture.co_run import co_runs_for, co_runs_to_time, time_co_runs
from prismscale.errors import ScriptError
from prismscale.graph.facts import CaptureFacts, CoRunFacts
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from support.traces import loop_trace

REDUCE = CollectiveOp.ALL_REDUCE
ALONE = CaptureFacts(calls=5, device="cpu")
IN_COMPANY = CoRunFacts(issue_ns=30, common_jitter=0.5, ranks=(0, 1))


def trace(rank: int, *calls: tuple[CollectiveOp, int, int]) -> RankTrace:
    """A rank of eight; its groups are the world, a pair and, of two ranks that differ by four, one
    more."""
    pairs = [GroupRecord(ranks=(r, r + 1)) for r in range(0, 8, 2)]
    far = [GroupRecord(ranks=(r, r + 4)) for r in range(4)]
    groups = [GroupRecord(ranks=tuple(range(8))), *pairs, *far]
    made = loop_trace(8, 8, rank=rank, body=list(calls) or None, groups=groups)
    return replace(made, facts=ALONE)


def of(*traces: RankTrace) -> dict[int, RankTrace]:
    """By rank."""
    return {t.rank: t for t in traces}


def test_a_rank_runs_beside_whom_it_communicates_with_most() -> None:
    """As often as counts, not as much."""
    calls = [(REDUCE, 1 << 20, 1), (REDUCE, 8, 2), (REDUCE, 8, 2)]
    assert co_runs_for(of(trace(0, *calls)), cores=2) == [(0, 4)]
    assert co_runs_for(of(trace(0, *calls)), cores=4) == [(0, 1, 4)]


def test_a_rank_whose_groups_are_too_large_runs_in_no_slice() -> None:
    """It keeps what it was captured with alone."""
    assert co_runs_for(of(trace(0)), cores=2) == []
    assert co_runs_for(of(trace(0)), cores=8) == [tuple(range(8))]


def test_captured_ranks_share_a_slice() -> None:
    """Each is timed once."""
    calls = [(REDUCE, 8, 1)]
    assert co_runs_for(of(*(trace(r, *calls) for r in (0, 1, 5))), cores=2) == [(0, 1), (4, 5)]


@dataclass
class Runner:
    """Gives slices the durations ``again``, by rank."""

    traces: dict[int, RankTrace]
    again: dict[int, RankTrace]
    error: Exception | None = None
    jobs: int = 2
    spec: Any = field(
        default_factory=lambda: SimpleNamespace(device="cpu", communication_load=True)
    )
    asked: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def capture_together(self, ranks: Sequence[int], *, marks: int) -> list[RankTrace]:
        """Note, and answer."""
        self.asked.append((tuple(ranks), marks))
        if self.error is not None:
            raise self.error
        return [self.again[r] for r in ranks if r in self.again]


def slower(made: RankTrace) -> RankTrace:
    """The same, with other durations, and settled later."""
    facts = replace(ALONE, calls_in_prologue=2, co_run=IN_COMPANY)
    return replace(made, body_ns_SB=np.full((3, made.n_body), 7), facts=facts)


def test_a_rank_gets_the_durations_of_its_slice() -> None:
    """For as many optimizer calls as it made alone; nothing else of it changes."""
    alone = trace(0, (REDUCE, 8, 1))
    runner = Runner(traces=of(alone), again=of(slower(alone), slower(trace(1, (REDUCE, 8, 1)))))
    time_co_runs(runner, co_runs_to_time(runner))
    assert runner.asked == [((0, 1), 5)]
    assert (runner.traces[0].body_ns_SB == 7).all()
    assert runner.traces[0].prologue_ns is alone.prologue_ns
    assert runner.traces[0].facts == replace(ALONE, co_run=IN_COMPANY)
    assert set(runner.traces) == {0}


def test_a_rank_that_does_something_else_in_company_keeps_its_own() -> None:
    """Other bytes are another program."""
    alone = trace(0, (REDUCE, 8, 1))
    runner = Runner(traces=of(alone), again=of(slower(trace(0, (REDUCE, 16, 1)))))
    time_co_runs(runner, co_runs_to_time(runner))
    assert runner.traces[0] is alone


def test_a_rank_that_fails_in_company_keeps_its_own() -> None:
    """gloo may not know what an emulated backend answers."""
    alone = trace(0, (REDUCE, 8, 1))
    runner = Runner(traces=of(alone), again={}, error=ScriptError("no AVG in gloo", rank=0))
    time_co_runs(runner, co_runs_to_time(runner))
    assert runner.traces[0] is alone


def test_where_the_network_is_not_the_processors_work_nothing_is_timed_again() -> None:
    """Durations do not depend on company there."""
    runner = Runner(traces=of(trace(0, (REDUCE, 8, 1))), again={})
    assert co_runs_to_time(runner) == [(0, 1)]
    runner.spec.communication_load = False
    assert co_runs_to_time(runner) == []
    runner.spec.communication_load, runner.spec.device = True, "null"
    assert co_runs_to_time(runner) == []


def test_slices_are_counted_as_they_are_timed() -> None:
    """From the beginning: the first may take long."""
    alone = [trace(r, (REDUCE, 8, 1)) for r in (0, 4)]
    runner = Runner(traces=of(*alone), again={})
    seen: list[tuple[int, int]] = []
    time_co_runs(runner, co_runs_to_time(runner), lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2)]
