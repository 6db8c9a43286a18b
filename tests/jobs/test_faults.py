"""Bad input and faults: a clear error, an exit code, nothing half-written, nobody left behind."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.runs import (
    FEW,
    command,
    environment,
    left_running,
    prismscale,
    results,
    run_job,
    write_program,
)

WORLD = 3
Limit = Callable[[], None]


@dataclass(frozen=True)
class Captured:
    """A run folder with captures, and its program."""

    out: Path
    script: Path

    def copy(self, folder: Path) -> Captured:
        """Another run folder of the same program."""
        shutil.copytree(self.out, folder / "run")
        return Captured(folder / "run", self.script)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("faults")
    script = write_program(folder / "program")
    done = run_job(folder / "run", WORLD, script)
    assert done.code == 0, done.err
    return Captured(folder / "run", script)


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Exit code 2, the path given, and no run folder."""
    done = run_job(tmp_path / "run", 2, "nowhere.py")
    assert done.code == 2
    assert "'nowhere.py' is not a file" in done.err
    assert not (tmp_path / "run").exists()


def test_an_exception_in_a_captured_rank_shows_its_traceback(tmp_path: Path) -> None:
    """The user's own frames, the rank, exit code 3, no results."""
    script = write_program(tmp_path, "def load():\n    raise KeyError('tokens')\nload()\n")
    done = run_job(tmp_path / "run", 2, script)
    assert done.code == 3
    assert f'File "{script}", line 2, in load' in done.err
    assert re.search(r"the program failed on rank \d during capture: KeyError: 'tokens'", done.err)
    assert "prismscale/capture" not in done.err
    assert not (tmp_path / "run" / "results.json").exists()


def test_an_exception_on_a_live_rank_shows_its_traceback_once(
    captured: Captured, tmp_path: Path
) -> None:
    """Another live rank, which then waits for it, is not blamed."""
    here = captured.copy(tmp_path)
    flag = here.script.with_name("fail-1")
    flag.touch()
    try:
        done = run_job(here.out, WORLD, "--live", "0,1", here.script)
    finally:
        flag.unlink()
    assert done.code == 3
    assert "failed on rank 1 during the live run: ValueError: bad batch" in done.err
    assert (done.out + done.err).count("Traceback") == 1
    assert not (here.out / "results.json").exists()


def test_a_world_size_that_the_mesh_cannot_use_is_said_by_the_script(tmp_path: Path) -> None:
    """The script's own message, and not much else."""
    example = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
    options = ["--world-size", 6, "--out", tmp_path / "run"]
    done = prismscale("run", *options, example, "--device", "cpu", "--tp", "4")
    assert done.code == 3
    assert "world size 6" in done.err
    assert "gave up on rank" in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) < 24


def test_a_world_that_does_not_fill_its_nodes_is_refused(tmp_path: Path) -> None:
    """The cluster's nodes have 8 devices."""
    script = write_program(tmp_path)
    done = run_job(tmp_path / "run", 12, script)
    assert done.code == 2
    assert "does not fill nodes of 8" in done.err


def test_collectives_that_differ_between_ranks_name_rank_group_and_line(tmp_path: Path) -> None:
    """Rank 1 reduces another tensor than rank 0: exit code 4."""
    script = write_program(tmp_path, _loop("dist.all_reduce(torch.ones(4 + 4 * (rank == 1)))"))
    done = run_job(tmp_path / "run", 2, script)
    assert done.code == 4
    assert "rank 0 calls all_reduce of 16 bytes" in done.err
    assert "rank 1 calls all_reduce of 32 bytes" in done.err
    assert "group 'default_pg' of 2" in done.err
    assert "train.py:7" in done.err


def test_groups_used_in_opposite_order_are_found_stuck(tmp_path: Path) -> None:
    """Legal node by node, but nobody can advance: exit code 5, and who waits for whom."""
    opposite = "for g in (a, b) if rank else (b, a): dist.all_reduce(torch.ones(4), group=g)"
    setup = "a, b = dist.new_group([0, 1]), dist.new_group([0, 1])"
    script = write_program(tmp_path, _loop(opposite, setup))
    done = run_job(tmp_path / "run", 2, script)
    assert done.code == 5
    assert "rank 0 waits for rank 1" in done.err
    assert "rank 1 waits for rank 0" in done.err


def test_a_program_without_steps_is_told_how_to_mark_them(tmp_path: Path) -> None:
    """Exit code 2, and the option that helps."""
    script = write_program(tmp_path, "import torch.distributed as d\nd.init_process_group()\n")
    done = run_job(tmp_path / "run", 1, script)
    assert done.code == 2
    assert "0 optimizer calls" in done.err
    assert "--step-marker" in done.err


def test_a_rank_that_takes_too_long_ends_the_run(tmp_path: Path) -> None:
    """A program that waits for something that never comes."""
    script = write_program(tmp_path, "import time\ntime.sleep(600)\n")
    done = run_job(tmp_path / "run", 1, "--capture-timeout", "0.1", script)
    assert done.code == 2
    assert "rank 0 was not captured within 0.1 s (--capture-timeout)" in done.err


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    """For example by the kernel, for want of memory."""
    script = write_program(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run_job(tmp_path / "run", 1, script)
    assert done.code == 3
    assert "rank 0 was ended by signal 9 (so Linux ends a process when memory is short)" in done.err


def test_a_hang_names_the_rank_and_every_group_that_waits(
    captured: Captured, tmp_path: Path
) -> None:
    """Exit code 5; the report is written, and its step never ends."""
    here = captured.copy(tmp_path)
    done = run_job(here.out, WORLD, "--hang", "2@step3", here.script)
    assert done.code == 5
    assert "The step never ends" in done.out
    assert "rank 2 never begins step 3" in done.err
    assert "ranks 0, 1 wait for rank 2: all_reduce" in done.err
    found = results(here.out)
    assert found["step_ns"] >= 2**60
    assert (here.out / "report.html").exists()


def test_a_hang_ends_live_ranks_too(captured: Captured, tmp_path: Path) -> None:
    """The one that waits (0) and the one that hangs (2)."""
    here = captured.copy(tmp_path)
    done = run_job(here.out, WORLD, "--live", "0,2", "--hang", "2@step1", here.script)
    assert done.code == 5
    assert "wait for rank 2" in done.err
    assert 0 < done.out.count("together") < 50
    assert results(here.out)["live"] == []


def test_a_straggler_slows_everybody(captured: Captured, tmp_path: Path) -> None:
    """Data-parallel ranks wait for the slowest in every step."""
    here = captured.copy(tmp_path)
    before = results(here.out)["step_ns"]
    done = run_job(here.out, WORLD, "--slow", "2=100", here.script)
    assert done.code == 0
    # Steps of this program differ by half their length, and another one may be the median: the
    # factor is so large that no such difference hides it.
    assert 10 * before < results(here.out)["step_ns"] < 200 * before


def test_an_unknown_cluster_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    """Exit code 2, the presets, and the likely one."""
    script = write_program(tmp_path)
    done = run_job(tmp_path / "run", 2, "--cluster", "h100", script)
    assert done.code == 2
    assert "did you mean h100-sxm?" in done.err


def test_a_damaged_capture_is_refused(captured: Captured, tmp_path: Path) -> None:
    """Exit code 6, the file, and how to go on."""
    here = captured.copy(tmp_path)
    (trace,) = here.out.glob("captures/*/rank-0.parquet")
    trace.write_bytes(trace.read_bytes()[:-100])
    done = run_job(here.out, WORLD, here.script)
    assert done.code == 6
    assert "rank-0.parquet" in done.err
    assert "--fresh" in done.err


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Not even with --fresh."""
    script = write_program(tmp_path)
    done = run_job(tmp_path, 2, "--fresh", script)
    assert done.code == 2
    assert "holds files that are not a run's" in done.err
    assert script.exists()


@pytest.fixture(params=["64k", "1m"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Limit]]:
    """A folder on a full disk: a small file system for root, a limit on files for others.

    A trace does not fit into 64 KiB twice, an HTML report does not fit into 1 MiB.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    )
    n_bytes = {"64k": 4 << 10, "1m": 1 << 20}[request.param]

    def limit() -> None:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))

    yield folder, limit
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run_with_nothing_half_written(
    small_disk: tuple[Path, Limit], tmp_path: Path
) -> None:
    """Exit code 7, the file or folder, and no part of a report."""
    folder, limit = small_disk
    script = write_program(tmp_path)
    run = subprocess.run(
        command("run", "--world-size", 1, "--out", folder / "run", *FEW, script),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert run.returncode == 7, run.stderr
    assert str(folder) in run.stderr
    assert "Traceback" not in run.stderr
    assert not (folder / "run" / "report.html").exists()
    assert not list(folder.rglob(".*.part"))


FAMILY = """
import subprocess
subprocess.Popen(["sleep", "300"])
"""
"""A program with a process of its own, as data loaders have."""
ENDLESS = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as programs do that save a checkpoint then
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_in_capture_leaves_nobody(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Not the rank, which refuses to go, and not the rank's own child."""
    script = write_program(tmp_path, FAMILY + "print('here', flush=True)" + ENDLESS)
    log = tmp_path / "run" / "logs" / "capture-rank-0.log"
    _interrupt(tmp_path / "run", 1, [script], number, code, lambda: "here" in _read(log))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_live_run_that_is_ended_leaves_no_shared_memory(
    captured: Captured, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Two live ranks that exchange tensors, and a coordinator."""
    here = captured.copy(tmp_path)
    log = here.out / "logs" / "live-rank-0.log"
    program = ["--steps", "100000", "--live", "0,1", here.script]
    pid = _interrupt(here.out, WORLD, program, number, code, lambda: "together" in _read(log))
    assert not list(Path("/dev/shm").glob(f"prismscale-{pid}-*"))
    assert not (here.out / "results.json").exists()


def _interrupt(
    out: Path,
    world_size: int,
    program: list[object],
    number: signal.Signals,
    code: int,
    reached: Callable[[], bool],
) -> int:
    """Send a signal once a stage is reached; check exit code and processes."""
    mark = uuid.uuid4().hex
    run = subprocess.Popen(
        command("run", "--world-size", world_size, "--out", out, *FEW, *program),
        env=environment(mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not reached():
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == code
    assert "Traceback" not in said
    assert left_running(mark) == []
    return run.pid


def _read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def _loop(line: str, setup: str = "pass") -> str:
    """A program whose every step is ``line``, at line 7 of the file."""
    return f"""import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
{setup}
from marker import step_ends
for _ in range(12):
    {line}
    step_ends()
"""
