"""Import of straggler traces: waiting told apart, hidden barriers found, bad input mended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError
from prismscale.formats.straggler import read_straggler
from prismscale.formats.straggler.rank_programs import BARRIER_LABEL
from prismscale.sim.timeline import simulate
from prismscale.validation.recorded_draws import ReplicaDraws, pick
from support.straggler_traces import COLLECTIVE, LOSS_BARRIER, TRANSFER, make_rows, write


def replayed_ns(samples: StepSamples) -> list[int]:
    steps = range(samples.n_steps)
    return [simulate(samples.graph, samples.durations(t), steps=1).step_ns for t in steps]


def durations_of(samples: StepSamples, label: str) -> np.ndarray:
    found = []
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        labels = [rank_class.trace.labels[i] for i in rank_class.trace.label_N.tolist()]
        found += [own.body_ns[i].ravel() for i, x in enumerate(labels) if x == label]
    return np.concatenate(found)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(make_rows(), tmp_path / "trace-X.parquet")


def test_replay_of_every_step_takes_as_long_as_recorded(trace: Path) -> None:
    """Re-timing a step from its own durations gives back the recorded step time."""
    samples = read_straggler(trace).samples
    assert samples.observed_step_ns_T is not None
    assert replayed_ns(samples) == pytest.approx(samples.observed_step_ns_T.tolist(), abs=20)


def test_waiting_is_no_part_of_a_collective(trace: Path) -> None:
    """Own times are what the trace was made with, however long members waited."""
    samples = read_straggler(trace).samples
    for label, seconds in COLLECTIVE.items():
        assert durations_of(samples, label) == pytest.approx(seconds * 1e9, abs=20)


def test_waiting_is_no_part_of_a_message(trace: Path) -> None:
    """Sends, alone or batched with a receive, last their transfer time."""
    samples = read_straggler(trace).samples
    assert durations_of(samples, "forward-send") == pytest.approx(TRANSFER * 1e9, abs=20)


def test_hidden_barrier_of_the_last_stage_is_found(trace: Path) -> None:
    """Replicas of the last stage that go on together get a barrier, and nobody else does."""
    samples = read_straggler(trace).samples
    assert durations_of(samples, BARRIER_LABEL) == pytest.approx(LOSS_BARRIER * 1e9, abs=20)
    with_barrier = [
        c.members_M.tolist() for c in samples.graph.classes if BARRIER_LABEL in c.trace.labels
    ]
    assert with_barrier == [[2, 3]]


def test_workers_of_a_stage_share_a_class(trace: Path) -> None:
    """Structure is stored once a stage, durations once a worker."""
    samples = read_straggler(trace).samples
    assert [c.members_M.tolist() for c in samples.graph.classes] == [[0, 1], [2, 3]]


def test_messages_know_their_microbatch(trace: Path) -> None:
    """A send carries the microbatch of the computation it follows."""
    samples = read_straggler(trace).samples
    trace_0 = samples.graph.classes[0].trace
    labels = [trace_0.labels[i] for i in trace_0.label_N.tolist()]
    sends = [i for i, x in enumerate(labels) if x == "forward-send"]
    assert samples.classes[0].microbatch_B[sends].tolist() == [0, 1]


def test_slice_forecast_rises_when_a_worker_outside_it_slows(trace: Path) -> None:
    """No waiting hides in a slice's durations, so others' speed shows."""
    samples = read_straggler(trace).samples
    draws = ReplicaDraws(samples=samples, replica=0, picks=pick(samples, 0, draws=50, seed=1))
    slow = replace(draws, slowdown_R={3: 2.0})
    fast_ns, slow_ns = (
        np.median(simulate(samples.graph, d, steps=1, draws=50).step_ns_D) for d in (draws, slow)
    )
    assert slow_ns > 1.2 * fast_ns


def test_draws_of_a_replica_repeat_with_the_seed(trace: Path) -> None:
    """The same seed gives the same draws."""
    samples = read_straggler(trace).samples
    first, again = (pick(samples, 0, draws=5, seed=3) for _ in range(2))
    assert np.array_equal(first.step_DPQ, again.step_DPQ)


def test_nan_and_negative_durations_leave_their_step_out(tmp_path: Path) -> None:
    """A step with impossible values is skipped and named; the others stay."""
    rows = make_rows()
    rows[3]["duration"] = float("nan")
    next(r for r in rows if r["step"] == 12)["duration"] = -1.0
    imported = read_straggler(write(rows, tmp_path / "t.parquet"))
    assert imported.samples.step_ids == (11, 13, 14, 15)
    assert sum("negative or no number" in line for line in imported.repairs) == 2


def test_clock_jump_leaves_its_step_out(tmp_path: Path) -> None:
    """A worker whose clock jumps by 50 ms within a step costs that step only."""
    rows = make_rows()
    worker = [r for r in rows if (r["step"], r["stage"], r["dp_rank"]) == (13, 1, 0)]
    for row in worker[4:]:
        row["start_ts"] -= 0.05
    imported = read_straggler(write(rows, tmp_path / "t.parquet"))
    assert 13 not in imported.samples.step_ids
    assert any("clock" in line for line in imported.repairs)


def test_missing_worker_in_one_step_leaves_the_step_out(tmp_path: Path) -> None:
    """A step is complete or not used."""
    rows = [r for r in make_rows() if (r["step"], r["stage"], r["dp_rank"]) != (11, 0, 1)]
    imported = read_straggler(write(rows, tmp_path / "t.parquet"))
    assert 11 not in imported.samples.step_ids


def test_worker_missing_everywhere_is_refused_by_name(tmp_path: Path) -> None:
    """Waiting cannot be told apart without all members."""
    rows = [r for r in make_rows() if (r["stage"], r["dp_rank"]) != (0, 1)]
    with pytest.raises(FormatError, match=r"\(dp 1, stage 0\)"):
        read_straggler(write(rows, tmp_path / "t.parquet"))


def test_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    """The same row twice is one row."""
    rows = make_rows()
    imported = read_straggler(write([*rows, *rows[:7]], tmp_path / "t.parquet"))
    assert imported.samples.n_steps == 6
    assert "7 repeated rows dropped" in imported.repairs


def test_step_recorded_twice_differently_is_left_out(tmp_path: Path) -> None:
    """Two different records of one step cannot both be right."""
    rows = make_rows()
    twice = [{**r, "start_ts": r["start_ts"] + 1} for r in rows if r["step"] == 14]
    imported = read_straggler(write([*rows, *twice], tmp_path / "t.parquet"))
    assert 14 not in imported.samples.step_ids


def test_truncated_file_is_refused(trace: Path) -> None:
    """Half a Parquet file is no trace."""
    trace.write_bytes(trace.read_bytes()[:2000])
    with pytest.raises(FormatError, match="not a readable Parquet file"):
        read_straggler(trace)


def test_missing_column_is_named(tmp_path: Path) -> None:
    """The message says which column, and which are needed."""
    rows = [{k: v for k, v in r.items() if k != "seq_id"} for r in make_rows()]
    with pytest.raises(FormatError, match="no column seq_id"):
        read_straggler(write(rows, tmp_path / "t.parquet"))


def test_unknown_operation_is_refused(tmp_path: Path) -> None:
    """Nobody can say who waits in an operation of unknown type."""
    rows = make_rows()
    for row in rows:
        row["optype"] = row["optype"].replace("optimizer-clip-main-grad", "moonwalk")
    with pytest.raises(FormatError, match="'moonwalk' is unknown"):
        read_straggler(write(rows, tmp_path / "t.parquet"))


def test_metadata_beside_the_trace_is_checked(trace: Path) -> None:
    """Sizes of the metadata must agree with the trace."""
    trace.with_name("meta-X.yaml").write_text("dp_size: 4\npp_size: 2\n")
    with pytest.raises(FormatError, match="are not in the trace"):
        read_straggler(trace)


def test_long_traces_keep_as_many_steps_as_fit(trace: Path) -> None:
    """With a row budget, steps are thinned out evenly and the rest reported."""
    imported = read_straggler(trace, max_rows=200)
    assert 0 < imported.samples.n_steps < 6
    assert any("rows are kept in memory" in line for line in imported.repairs)
