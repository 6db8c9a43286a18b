"""A live rank on a device with streams, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import InstanceIds
from prismscale.errors import StuckError
from prismscale.graph.node import CollectiveOp
from prismscale.live.exchange import Exchange
from prismscale.payload.mirror import MirrorPayload
from support.streamed_program import (
    MS,
    US,
    WORLD,
    Program,
    live,
    periods,
    recorded_trace,
    simulated_step_ns,
    train,
)


class TestLive:
    def test_step_time_is_the_simulated_one(self, tmp_path: Path) -> None:
        """A live rank that computes as captured takes as long as the engine says."""
        trace = recorded_trace()
        with live(trace, tmp_path) as (run, program):
            train(program, run.hook.step_ended, 4)
            assert run.streams.now_ns == 0, "the host was blocked"
            steps = run.hook.finish()
        expected = simulated_step_ns(trace)
        assert expected > 3_800 * US
        assert periods(steps) == [expected] * 3

    def test_late_pacer_costs_no_logical_time(self, tmp_path: Path) -> None:
        """What the pacer's own slowness adds is measured and taken out."""
        trace = recorded_trace()
        with live(trace, tmp_path, tick_ns=40 * US) as (run, program):
            train(program, run.hook.step_ended, 4)
            steps = run.hook.finish()
        assert np.mean(periods(steps)) == pytest.approx(simulated_step_ns(trace), abs=60 * US)
        assert steps[-1].lag_ns > 3 * 40 * US

    def test_barrier_returns_when_it_ends(self, tmp_path: Path) -> None:
        """The host is held until the device has done everything before the barrier."""

        def body(program: Program, step_ended: Any, steps: int) -> None:
            for _ in range(steps):
                program.work(2 * MS)
                program.communicate(CollectiveOp.BARRIER, sync=True)
                step_ended()

        with live(recorded_trace(body), tmp_path) as (run, program):
            body(program, run.hook.step_ended, 2)
            assert run.streams.now_ns > 4 * MS
            run.hook.finish()

    def test_arrivals_of_one_group_are_told_in_program_order(self, tmp_path: Path) -> None:
        """A collective on an idle stream does not overtake one of its group on a busy stream."""

        def body(program: Program, step_ended: Any, steps: int) -> None:
            side = program.streams.create()
            for _ in range(steps):
                program.work(2 * MS)
                first = program.communicate()
                with program.streams.on(side):
                    second = program.communicate(CollectiveOp.ALL_GATHER)
                first.wait()
                second.wait()
                step_ended()

        trace = recorded_trace(body)
        with live(trace, tmp_path) as (run, program):
            body(program, run.hook.step_ended, 4)
            steps = run.hook.finish()
        assert periods(steps) == pytest.approx([simulated_step_ns(trace)] * 3, abs=8 * US)

    def test_slow_rank_takes_longer_on_the_device(self, tmp_path: Path) -> None:
        """A factor on computation holds the program's stream for the rest of it."""
        trace = recorded_trace()
        with live(trace, tmp_path, compute_factor=1.5) as (run, program):
            train(program, run.hook.step_ended, 4)
            steps = run.hook.finish()
        assert min(periods(steps)) > simulated_step_ns(trace) + 1_500 * US

    def test_hang_is_raised_and_nothing_stays_held(self, tmp_path: Path) -> None:
        """When the job hangs the program hears of it at its next communication."""
        with live(recorded_trace(), tmp_path, hang={1: 0}) as (run, program):
            with pytest.raises(StuckError, match="rank"):
                train(program, run.streams.synchronize, 8)
            run.streams.synchronize()

    def test_other_live_ranks_contribute_through_host_memory(self, tmp_path: Path) -> None:
        """A collective with a live peer combines real values before its stream is let go."""
        trace = recorded_trace()
        with live(trace, tmp_path) as (run, _):
            run.hook.exchange = Exchange(folder=tmp_path, rank=0, live=frozenset({0, 1}))
            run.hook.payload = MirrorPayload()
            tensor = torch.ones(1 << 20)
            peer = Exchange(folder=tmp_path, rank=1, live=frozenset({0, 1}))
            batch = Collective(
                op=CollectiveOp.ALL_REDUCE,
                group=WORLD,
                inputs=(tensor,),
                outputs=(tensor,),
                n_bytes=tensor.nbytes,
            )
            run.hook.cursor = Anywhere()  # type: ignore[assignment]
            instance = peer_instance(batch)
            peer.offer(instance, batch, [0])
            tensor.mul_(2)
            run.hook.communicate([batch])
            assert tensor.unique().tolist() == [3.0]
            assert run.words.gates.max() == 1


class Anywhere:
    """A program of one communication that the graph does not have."""

    def next_position(self, collective: Collective) -> None:
        return None


def peer_instance(collective: Collective) -> str:
    """What rank 1 calls the first use of the world group."""
    ids = InstanceIds()
    ids.group_created(WORLD.ranks, "", "nccl", 0)
    return ids.name(collective)
