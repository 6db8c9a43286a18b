"""Step samples: replay, selection, recombination, and their file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import SAMPLES_FILE, has_samples, load_samples, save_samples
from prismscale.errors import FormatError, UsageError
from prismscale.formats.straggler import read_straggler
from prismscale.sim.timeline import simulate
from support.jobs import pipeline_job
from support.straggler_traces import make_rows, write


@dataclass
class StepByDraw:
    """Draw ``d`` takes everything from step ``step_D[d]``."""

    step_D: list[int]

    def steps(self, class_index: int, node: int) -> NDArray[np.int64]:
        return np.array(self.step_D)[:, None]


@pytest.fixture
def samples(tmp_path: Path) -> StepSamples:
    return read_straggler(write(make_rows(), tmp_path / "trace-X.parquet")).samples


def test_draws_of_whole_steps_replay_those_steps(samples: StepSamples) -> None:
    """Recombining with one step a draw is as replaying that step."""
    picked = [4, 0, 4]
    drawn = simulate(samples.graph, samples.recombined(StepByDraw(picked)), steps=1, draws=3)
    alone = [simulate(samples.graph, samples.durations(t), steps=1).step_ns for t in picked]
    assert drawn.step_ns_D.tolist() == alone


def test_selected_steps_keep_their_numbers_and_times(samples: StepSamples) -> None:
    """A half of the steps is a recording of its own."""
    half = samples.select([1, 3])
    assert half.step_ids == (11, 13)
    for mine, theirs in ((0, 1), (1, 3)):
        a, b = half.durations(mine), samples.durations(theirs)
        assert (
            simulate(half.graph, a, steps=1).step_ns == simulate(samples.graph, b, steps=1).step_ns
        )


def test_step_that_was_not_recorded_is_refused(samples: StepSamples) -> None:
    """The message says which exist."""
    with pytest.raises(UsageError, match="0 … 5"):
        samples.durations(6)


def test_equal_work_has_equal_signatures(samples: StepSamples) -> None:
    """Microbatches of one stage share a pool; stages do not."""
    labels = [
        samples.graph.classes[0].trace.labels[i] for i in samples.graph.classes[0].trace.label_N
    ]
    first, second = (i for i, x in enumerate(labels) if x == "forward-compute")
    assert samples.signature(0, first) == samples.signature(0, second)
    other = samples.graph.classes[1].trace
    there = [other.labels[i] for i in other.label_N].index("forward-compute")
    assert samples.signature(0, first) != samples.signature(1, there)


def test_graph_tells_stage_and_replica() -> None:
    """Groups with point-to-point traffic are pipelines: position is the stage."""
    samples = StepSamples.from_graph(pipeline_job(2, 3, 1, 2))
    assert samples.stage_R.tolist() == [0, 0, 0, 1, 1, 1]
    assert samples.replica_R.tolist() == [0, 1, 2, 0, 1, 2]


def test_file_gives_back_the_samples(samples: StepSamples, tmp_path: Path) -> None:
    """Everything survives the disk: durations, microbatches, places, observed times."""
    assert not has_samples(tmp_path)
    save_samples(samples, tmp_path)
    back = load_samples(tmp_path)
    assert back.step_ids == samples.step_ids
    assert np.array_equal(back.replica_R, samples.replica_R)
    assert np.array_equal(back.observed_step_ns_T, samples.observed_step_ns_T)
    for mine, theirs in zip(back.classes, samples.classes, strict=True):
        assert np.array_equal(mine.microbatch_B, theirs.microbatch_B)
        assert all(map(np.array_equal, mine.body_ns, theirs.body_ns))


def test_samples_of_another_graph_are_refused(samples: StepSamples, tmp_path: Path) -> None:
    """A samples file beside a graph that it was not made for is noticed."""
    save_samples(samples, tmp_path)
    foreign = (tmp_path / SAMPLES_FILE).read_bytes()
    save_samples(StepSamples.from_graph(pipeline_job(2, 1, 1, 2)), tmp_path)
    (tmp_path / SAMPLES_FILE).write_bytes(foreign)
    with pytest.raises(FormatError, match="another graph"):
        load_samples(tmp_path)
