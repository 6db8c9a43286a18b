"""Captures as processes: collected, reused, and told apart when they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.launcher import CaptureRunner, failure_of
from prismscale.errors import (
    FormatError,
    MismatchError,
    PrismscaleError,
    ScriptError,
    StorageError,
    StuckError,
    UsageError,
)
from prismscale.graph.io import save_trace
from prismscale.graph.trace import RankTrace
from prismscale.processes.children import Child
from support.runs import write_program
from support.traces import loop_trace


@pytest.fixture
def spec(tmp_path: Path) -> CaptureSpec:
    return CaptureSpec(
        rank=0,
        world_size=4,
        local_world_size=4,
        target=str(write_program(tmp_path / "program")),
        is_module=False,
        args=("--lr", "1"),
        device="cpu",
        samples=2,
        step_marker="marker:step_ends",
        track_memory=False,
        communication_load=False,
        payloads=str(tmp_path / "payloads"),
        out=str(tmp_path),
    )


def test_ranks_are_captured_side_by_side(spec: CaptureSpec, tmp_path: Path) -> None:
    """Each in its own process, with its own trace; progress is told."""
    seen: list[tuple[int, int]] = []
    runner = CaptureRunner(
        spec=spec, logs=tmp_path / "logs", progress=lambda *state: seen.append(state)
    )
    runner.capture([0, 3])
    assert {r: t.rank for r, t in runner.traces.items()} == {0: 0, 3: 3}
    assert runner.traces[0].fingerprint() == runner.traces[3].fingerprint()
    assert seen == [(1, 2), (2, 2)]
    assert "together" in (tmp_path / "logs" / "capture-rank-3.log").read_text()


def test_a_capture_that_is_there_is_read(spec: CaptureSpec, tmp_path: Path) -> None:
    """No process is started: there is no log."""
    save_trace(loop_trace(4, 8, rank=2), replace(spec, rank=2).trace_path)
    runner = CaptureRunner(spec=spec, logs=tmp_path / "logs")
    runner.capture([2])
    assert runner.traces[2].rank == 2
    assert not (tmp_path / "logs").exists()


def test_a_capture_that_is_damaged_is_refused(spec: CaptureSpec, tmp_path: Path) -> None:
    """With the option that makes a new one."""
    spec.trace_path.write_text("not a trace")
    with pytest.raises(FormatError, match="--fresh"):
        CaptureRunner(spec=spec, logs=tmp_path / "logs").capture([0])


def write_shared(folder: Path, body: str) -> str:
    """A program in which rank 0 takes a while to write a file that all ranks read."""
    (folder / "marker.py").write_text("def step_ends() -> None:\n    pass\n")
    program = folder / "shared.py"
    program.write_text(
        "import os, pathlib, time\n"
        "import torch.distributed as dist\n"
        "from marker import step_ends\n"
        "shared = pathlib.Path(__file__).with_name('shared.txt')\n"
        'dist.init_process_group("gloo")\n'
        f"{body}"
        "dist.barrier()\n"
        "shared.read_text()\n"
        "for _ in range(20):\n"
        "    dist.barrier()\n"
        "    step_ends()\n"
    )
    return str(program)


def runner_of_shared(spec: CaptureSpec, folder: Path, body: str) -> CaptureRunner:
    """Captures two ranks of that program at a time."""
    target = write_shared(folder, body)
    return CaptureRunner(spec=replace(spec, target=target), logs=folder / "logs", jobs=2)


def test_a_rank_that_reads_what_another_writes_runs_again_after_it(
    spec: CaptureSpec, tmp_path: Path
) -> None:
    """The barrier between the two keeps nobody from going on."""
    body = "if dist.get_rank() == 0:\n    time.sleep(1)\n    shared.write_text('x')\n"
    runner = runner_of_shared(spec, tmp_path, body)
    runner.capture([0, 3])
    assert sorted(runner.traces) == [0, 3]


def test_a_rank_that_fails_when_the_other_has_ended_runs_again(
    spec: CaptureSpec, tmp_path: Path
) -> None:
    """It looked for the file before that was written, and took its time to fail."""
    body = (
        "if dist.get_rank() == 0:\n    time.sleep(0.5)\n    shared.write_text('x')\n"
        "elif not shared.exists():\n    time.sleep(6)\n    raise FileNotFoundError(shared)\n"
    )
    runner = runner_of_shared(spec, tmp_path, body)
    runner.capture([0, 3])
    assert sorted(runner.traces) == [0, 3]


def test_a_rank_that_is_told_what_another_sends_runs_again_after_it(
    spec: CaptureSpec, tmp_path: Path
) -> None:
    """Rank 3 gets what rank 0 sends in another group of the same kind, once that was captured."""
    body = (
        "rank = dist.get_rank()\n"
        "groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
        "if rank == 0:\n    time.sleep(1)\n"
        "told = [{'seed': 7} if rank % 2 == 0 else None]\n"
        "dist.broadcast_object_list(told, src=rank // 2 * 2, group=groups[rank // 2])\n"
        "shared.write_text(str(told[0]['seed']))\n"
    )
    runner = runner_of_shared(spec, tmp_path, body)
    runner.capture([0, 3])
    assert sorted(runner.traces) == [0, 3]
    assert (tmp_path / "shared.txt").read_text() == "7"


def test_a_file_that_no_rank_writes_is_missed_by_the_last_one_too(
    spec: CaptureSpec, tmp_path: Path
) -> None:
    """No rank runs again for ever."""
    runner = runner_of_shared(spec, tmp_path, "")
    with pytest.raises(ScriptError, match=r"FileNotFoundError.*shared\.txt"):
        runner.capture([0, 3])


def test_where_all_ranks_fail_the_lowest_is_told(spec: CaptureSpec, tmp_path: Path) -> None:
    """Rank 3 misses what rank 0 would have written, had it not failed."""
    body = "if dist.get_rank() == 0:\n    raise ValueError('no documents')\ntime.sleep(1)\n"
    runner = runner_of_shared(spec, tmp_path, body)
    with pytest.raises(ScriptError, match="rank 0 during capture: ValueError: no documents"):
        runner.capture([0, 3])


MESSAGES = {
    "a message": "if rank == 0:\n    dist.send(torch.ones(4), 2)\n",
    "groups named for a pipeline": (
        "for ranks in ([0, 2], [1, 3]):\n"
        "    dist.new_group(ranks, group_desc='PIPELINE_MODEL_PARALLEL_GROUP')\n"
        "dist.barrier()\n"
    ),
    "nothing": "",
}


@pytest.mark.parametrize("first", MESSAGES)
def test_a_first_message_begins_other_ranks(spec: CaptureSpec, tmp_path: Path, first: str) -> None:
    """While rank 0's program runs on: it waits for what rank 2 writes, which nobody else asks for.
    A program that sends nothing is captured as ever."""
    sends = first != "nothing"
    body = (
        "import torch\n"
        "rank = dist.get_rank()\n"
        f"{MESSAGES[first]}"
        f"while rank == 0 and {sends} and not shared.exists():\n"
        "    time.sleep(0.01)\n"
        f"if rank == 2 or not {sends}:\n"
        "    shared.write_text('x')\n"
    )
    target = write_shared(tmp_path, body)

    def receivers(told: RankTrace) -> list[int]:
        (message,) = np.flatnonzero(told.is_message_N)
        ranks = told.groups[int(told.group_index_N[message])].ranks
        return [ranks[int(told.peer_N[message])]]

    runner = CaptureRunner(
        spec=replace(spec, target=target),
        logs=tmp_path / "logs",
        jobs=2,
        after_first_message=receivers,
    )
    runner.capture([0])
    assert sorted(runner.traces) == ([0, 2] if sends else [0])
    assert not [*tmp_path.glob("first-message*")]


def test_a_rank_that_waits_for_its_turn_is_counted_once(spec: CaptureSpec, tmp_path: Path) -> None:
    """Rank 2 is to be captured anyway when rank 0's first message asks for it."""
    body = "import torch\nif dist.get_rank() == 0:\n    dist.send(torch.ones(4), 2)\n"
    target = write_shared(tmp_path, f"{body}    time.sleep(0.5)\nshared.write_text('x')\n")
    seen: list[tuple[int, int]] = []
    runner = CaptureRunner(
        spec=replace(spec, target=target),
        logs=tmp_path / "logs",
        jobs=1,
        progress=lambda *state: seen.append(state),
        after_first_message=lambda told: [2],
    )
    runner.capture([0, 2])
    assert seen == [(1, 2), (2, 2)]


def ended(folder: Path, code: int, said: str = "last words") -> Child:
    """A process that ended."""
    log = folder / "log"
    log.write_text(said)
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; os._exit({code})"])
    process.wait()
    return Child(name="5", process=process, log=log)


def failure(folder: Path, code: int = 3, **told: object) -> PrismscaleError:
    """The error of rank 5, which left a file if ``told``."""
    path = folder / "rank-5.error.json"
    if told:
        path.write_text(json.dumps({"rank": 5, "traceback": "Traceback", **told}))
    return failure_of(ended(folder, code), 5, path, "capture")


def test_a_programs_exception_keeps_its_traceback(tmp_path: Path) -> None:
    """And its rank."""
    error = failure(tmp_path, ours=False, kind="ValueError", summary="ValueError: bad")
    assert isinstance(error, ScriptError)
    assert (error.rank, error.traceback) == (5, "Traceback")
    assert str(error) == "the program failed on rank 5 during capture: ValueError: bad"


def test_a_program_that_gives_up_is_quoted(tmp_path: Path) -> None:
    """It has said why; a traceback through argparse would say nothing."""
    error = failure(tmp_path, ours=False, kind="SystemExit", summary="SystemExit: 2")
    assert isinstance(error, ScriptError)
    assert error.traceback == ""
    assert "last words" in str(error)


def test_a_process_without_an_error_is_quoted(tmp_path: Path) -> None:
    """A crash below Python."""
    assert "rank 5 exited with code 9 during capture" in str(failure(tmp_path, code=9))
    assert "last words" in str(failure(tmp_path, code=9))


@pytest.mark.parametrize(
    "kind", [UsageError, MismatchError, StuckError, FormatError, StorageError, PrismscaleError]
)
def test_our_own_errors_keep_their_kind(tmp_path: Path, kind: type[PrismscaleError]) -> None:
    """And so the command's exit code; the rank is named once."""
    for summary in ("no steps", "rank 5: no steps"):
        error = failure(tmp_path, ours=True, kind=kind.__name__, summary=summary)
        assert type(error) is kind
        assert str(error) == "rank 5: no steps"


def test_a_rank_that_cannot_even_write_its_error_has_a_full_disk(tmp_path: Path) -> None:
    """Its exit code says so."""
    error = failure(tmp_path, code=74)
    assert isinstance(error, StorageError)
    assert str(tmp_path) in str(error)
