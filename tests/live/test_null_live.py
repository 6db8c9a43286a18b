"""Live ranks on a GPU that is not there: what they observe, how they fail, how to debug them."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs import Ended, command, environment, prismscale, results

WORLD = 8
TRAINER = """
import pathlib, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch import nn

STAGES, MICROBATCHES, WIDTH = 2, 4, 2048
mesh = init_device_mesh("cuda", (STAGES, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
stage, pipeline = mesh.get_local_rank("pp"), mesh.get_group("pp")
rank, here = dist.get_rank(), pathlib.Path(__file__).parent
peer = mesh.mesh.flatten().tolist()[(rank + 4) % 8]
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3 + stage))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(20):
    began = time.perf_counter()
    inputs, outputs = [], []
    for _ in range(MICROBATCHES):
        x = torch.randn(512, WIDTH, device="cuda", requires_grad=True)
        if stage:
            dist.recv(x.data, peer, group=pipeline)
        y = model(x)
        dist.all_reduce(y, group=mesh.get_group("tp"))
        inputs.append(x)
        outputs.append(y)
        if not stage:
            dist.send(y.detach(), peer, group=pipeline)
    for x, y in zip(inputs, outputs):
        gradient = torch.ones_like(y)
        if not stage:
            dist.recv(gradient, peer, group=pipeline)
        y.backward(gradient)
        if stage:
            dist.send(x.grad, peer, group=pipeline)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    optimizer.zero_grad()
    if (here / f"leak-{rank}").exists() and step >= 5:
        kept += [torch.empty(2**33, dtype=torch.uint8, device="cuda") for _ in range(40)]
    if step == 2:
        breakpoint()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    print(f"took {time.perf_counter() - began:.9f} peak {peak}", flush=True)
"""
PATIENCE_S = 120
FEW = ("--device", "null", "--world-size", WORLD, "--steps", 4)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipeline stages of two data-parallel replicas of two tensor-parallel ranks."""
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(TRAINER)
    return path


def run(program: Path, *options: object) -> Ended:
    """The program with these options; its captures are made once."""
    return prismscale("run", *FEW, "--out", program.parent / "run", *options, program)


def steps_ns(program: Path) -> dict[int, tuple[int, int]]:
    """Predicted and observed step, by live rank."""
    live = results(program.parent / "run")["live"]
    return {r["rank"]: (r["predicted_step_ns"], r["median_step_ns"]) for r in live}


@pytest.fixture(scope="module")
def observed(program: Path) -> Ended:
    """Both ends of a pipeline, and two ranks of one tensor-parallel group."""
    done = run(program, "--live", "0,1,5")
    assert done.code == 0, done.err
    return done


def test_live_ranks_among_each_other_observe_what_was_predicted(
    observed: Ended, program: Path
) -> None:
    """They come to the same groups in the same order, and the model is one."""
    found = steps_ns(program)
    assert set(found) == {0, 1, 5}
    assert all(seen == pytest.approx(told, rel=1e-3) for told, seen in found.values())


def test_messages_in_the_group_of_all_ranks_cost_what_they_cost_in_the_pipelines(
    observed: Ended, program: Path, tmp_path: Path
) -> None:
    """Of time and of classes; what live ranks call is found again."""
    other = tmp_path / "train.py"
    other.write_text(TRAINER.replace(", group=pipeline", ""))
    done = prismscale("run", *FEW, "--live", "0,1,5", "--out", tmp_path / "run", other)
    assert done.code == 0, done.err
    found, told = results(tmp_path / "run"), results(program.parent / "run")
    assert found["step_ns"] == told["step_ns"]
    assert found["classes"] == told["classes"]
    assert all(
        rank["median_step_ns"] == pytest.approx(rank["predicted_step_ns"], rel=1e-3)
        for rank in found["live"]
    )


def test_the_programs_own_lines_show_the_jobs_time_and_memory(
    observed: Ended, program: Path
) -> None:
    """Once, with the rank: a whole step's time, and the peak that the report has."""
    lines = re.findall(r"^\[rank 5\] took (\S+) peak (\d+)$", observed.out, re.MULTILINE)
    (live,) = (r for r in results(program.parent / "run")["live"] if r["rank"] == 5)
    assert live["median_step_ns"] == pytest.approx(1e9 * float(lines[-1][0]), rel=0.05)
    assert live["peak_bytes"] == int(lines[-1][1])
    assert len(lines) == live["communications"] // 16 - 1


def test_what_live_ranks_send_each_other_takes_no_memory(observed: Ended, program: Path) -> None:
    """Their peak is the captured one, to the byte."""
    found = results(program.parent / "run")
    captured = {s["first_rank"]: s["peak_bytes"] for s in found["stages"]}
    live = {r["rank"]: r["peak_bytes"] for r in found["live"]}
    assert (live[0], live[5]) == (captured[0], captured[4])


@pytest.mark.parametrize("live", ["0,1", "0"], ids=["slow itself", "beside it"])
def test_a_slow_rank_slows_everybody(observed: Ended, program: Path, live: str) -> None:
    """Live or virtual, it costs the same, and the live rank beside it observes that."""
    fair = run(program, "--live", "0").code or steps_ns(program)[0][0]
    done = run(program, "--live", live, "--slow", "1=1.5")
    assert done.code == 0, done.err
    found = steps_ns(program)
    assert found[0][0] > 1.1 * fair
    assert all(seen == pytest.approx(told, rel=1e-3) for told, seen in found.values())


@pytest.mark.parametrize("live", ["0,1", "0,5"], ids=["hangs itself", "beside it"])
def test_a_hung_rank_is_named_with_every_group_that_waits(program: Path, live: str) -> None:
    """Whether it is live or not."""
    done = run(program, "--live", live, "--hang", "1@step2")
    assert done.code == 5
    assert "rank 1 never begins step 2" in done.err
    assert re.search(r"groups wait for ever:\n +.*rank", done.err)


SMALL = """
name = "small"
devices_per_node = 8
nics_per_node = 8
intra_node = { latency_ns = 1000, bandwidth_bytes_per_s = 4e11 }
inter_node = { latency_ns = 5000, bandwidth_bytes_per_s = 4e10 }
device = { name = "NVIDIA H100 80GB HBM3", memory_bytes = 1_830_000_000 }
"""
"""NCCL's buffers of every group fit in, the optimizer's state of neither stage does."""


def test_a_gpu_too_small_is_found_by_a_captured_rank(program: Path) -> None:
    """Torch's own error with the program's line, and who holds the memory, by name."""
    cluster = program.parent / "small.toml"
    cluster.write_text(SMALL)
    done = run(program, "--cluster", cluster)
    assert done.code == 3
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.err
    assert re.search(r"train.py\", line \d+", done.err)
    assert re.search(r"rank \d+ during capture", done.err)
    assert re.search(r"MiB  parameters: \d of them, the largest 16.0 MiB of \d.weight", done.err)


@pytest.fixture
def leak(program: Path) -> Iterator[None]:
    """Rank 1 takes memory in a later step than captures see."""
    path = program.parent / "leak-1"
    path.touch()
    yield
    path.unlink()


@pytest.mark.usefixtures("leak")
def test_a_live_rank_that_leaks_says_when_and_what(program: Path) -> None:
    """The live rank meets what its capture did not; the others end with it, on one screen."""
    done = run(program, "--live", "0,1", "--steps", 8)
    assert done.code == 3
    assert "rank 1 during the live run" in done.err
    assert "Out of memory in step 7, after 6 optimizer calls" in done.err
    assert re.search(r"9 × 8,192.0 MiB made by aten::empty", done.err)
    assert re.search(r"optimizer state: 6 of them, .* of exp_avg", done.err)
    assert len(done.err.splitlines()) < 40


def test_a_breakpoint_asks_in_the_terminal_of_the_attached_rank(program: Path) -> None:
    """Time stands still meanwhile; no other rank, captured or live, has stopped there."""
    options = ("--live", "0,1", "--attach", 1, "--out", program.parent / "run")
    with Terminal(command("run", *FEW, *options, program)) as terminal:
        terminal.read_to("(Pdb) ")
        terminal.type("print('rank', rank, 'step', step)")
        assert "rank 1 step 2" in terminal.read_to("(Pdb) ")
        terminal.type("continue")
        assert terminal.ended() == 0
    assert all(seen == pytest.approx(told, rel=1e-3) for told, seen in steps_ns(program).values())


class Terminal:
    """A command in a terminal, and who sits before it."""

    def __init__(self, words: list[str]) -> None:
        self._end, inner = pty.openpty()
        self._command = subprocess.Popen(
            words, stdin=inner, stdout=inner, stderr=inner, env=environment()
        )
        os.close(inner)
        self._text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._command.terminate()
        self._command.wait()
        os.close(self._end)

    def read_to(self, words: str) -> str:
        """What is shown up to ``words``."""
        while words not in self._text:
            assert select.select([self._end], [], [], PATIENCE_S)[0], self._text
            self._text += os.read(self._end, 4096).decode()
        seen, _, self._text = self._text.partition(words)
        return seen

    def type(self, line: str) -> None:
        """A line and return."""
        os.write(self._end, f"{line}\n".encode())

    def ended(self) -> int:
        """Wait for the end; returns the exit code."""
        with contextlib.suppress(OSError):  # Linux ends a terminal that nobody holds with EIO
            while os.read(self._end, 4096):
                pass
        return self._command.wait()
