"""Runs of a user's program: what they are told, and what is said where one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleError, ScriptError, UsageError
from prismscale.measure.gpu_figures import PlainFigures
from prismscale.runfolder import RunFolder
from prismscale.validation.gpu_runs import (
    GpuRuns,
    emulated_figures,
    rank_environment,
    refuse_incomparable,
)
from support.runs import run_job, write_program

TRAINER = """\
import sys
import torch

torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
model = torch.nn.Linear(64, 64, device="cuda")
optimizers = [torch.optim.SGD([p]) for p in model.parameters()]
for step in range(int(sys.argv[2])):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
"""


def runs_of(folder: Path, text: str, *args: str) -> GpuRuns:
    """Runs of a script of this text."""
    (folder / "train.py").write_text(text)
    script = Script(target=str(folder / "train.py"), args=args)
    return GpuRuns(script=script, scratch=folder, logs=folder / "logs", cluster="h100-sxm", total=1)


def test_a_program_runs_on_the_null_device(tmp_path: Path) -> None:
    """Two optimizers make one step; its arguments, even ours, are its own."""
    runs = runs_of(tmp_path, TRAINER, "--steps", "40", "--null", "--")
    seen: list[tuple[int, int]] = []
    runs.update = lambda done, total: seen.append((done, total))
    figures = runs.on_null(steps=4)
    assert len(figures.step_ns) == 3
    assert figures.reserved_bytes >= figures.peak_bytes >= 64 * 64 * 4
    assert figures.operations["aten.addmm.default"] == 4
    assert seen == [(1, 1)]


def test_a_program_that_ends_too_soon_is_refused(tmp_path: Path) -> None:
    """The median of a few first steps would say nothing."""
    with pytest.raises(UsageError, match="ended before its 4 optimizer steps were measured"):
        runs_of(tmp_path, TRAINER, "--steps", "2").on_null(steps=4)


def test_a_program_that_never_uses_the_gpu_is_refused() -> None:
    """Both sides would agree on nothing."""
    figures = PlainFigures(step_ns=(1, 1, 1), peak_bytes=0, reserved_bytes=0)
    with pytest.raises(UsageError, match=r"train\.py allocated nothing on the GPU"):
        refuse_incomparable(figures, 4, "train.py")


def test_an_exception_of_a_plain_rank_is_shown(tmp_path: Path) -> None:
    """With its rank, and the traceback of the user's own lines; other ranks do not wait."""
    text = "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(300)\n"
    runs = runs_of(tmp_path, text + "raise ValueError('bad batch')\n")
    said_of_it = r"failed on rank 1 during a plain run.*bad batch"
    with pytest.raises(ScriptError, match=said_of_it) as said:
        runs.plain(2, steps=8)
    assert said.value.rank == 1
    assert "train.py" in said.value.traceback
    assert "plain_program.py" not in said.value.traceback


def test_a_rank_that_vanishes_leaves_the_end_of_its_output(tmp_path: Path) -> None:
    """There is no traceback then."""
    text = "import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n"
    with pytest.raises(ScriptError, match=r"(?s)was ended by signal 9.*last words"):
        runs_of(tmp_path, text).plain(1, steps=8)


def test_an_emulated_run_that_fails_leaves_the_end_of_its_output(tmp_path: Path) -> None:
    """With or without a GPU."""
    runs = runs_of(tmp_path, "raise ValueError('bad batch')\n")
    said = r"(?s)^prismscale run --world-size 8 exited with code \d.*the end of its output.*error: "
    with pytest.raises(PrismscaleError, match=said):
        runs.emulated(8)


def test_figures_of_an_emulated_run_are_its_live_ranks(tmp_path: Path) -> None:
    """Of ``results.json`` and of the live rank's own file, which agree."""
    script = write_program(tmp_path / "program")
    done = run_job(tmp_path / "run", 2, "--live", "0", script)
    assert done.code == 0, done.err
    figures = emulated_figures(RunFolder(root=tmp_path / "run"), 12.5)
    assert figures.live.rank == figures.observed.rank == 0
    assert figures.live.communications == figures.observed.communications
    assert figures.live.median_step_ns > 0
    assert figures.command_s == 12.5


def test_a_module_is_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found from the folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer.py").write_text(TRAINER)
    script = Script(target="trainer", args=("--steps", "40"), is_module=True)
    runs = GpuRuns(script=script, scratch=tmp_path, logs=tmp_path / "logs", cluster="h100-sxm")
    assert len(runs.on_null(steps=4).step_ns) == 3


def test_ranks_share_the_first_gpu() -> None:
    """Everything else is as torchrun sets it."""
    found = rank_environment(3, 4, 29500)
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("3", "0", "4")
    assert found["MASTER_PORT"] == "29500"
