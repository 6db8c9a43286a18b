"""``prismscale fit`` on a program for GPUs, on a device that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prismscale.analysis.memory.memory_kinds import KINDS
from support.explored_program import WORLD, write_explored
from support.runs import Ended, prismscale, results

GIB = 2**30
RESTLESS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(8):
    loss = model(torch.zeros(8, 64, device="cuda")).sum()
    for _ in range(step):
        dist.all_reduce(loss.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if sys.argv[1] == "grows":
        kept.append(torch.empty(1 << 20, device="cuda"))
"""
"""Each step communicates once more."""
BROKEN_OFF = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
side = torch.cuda.Stream()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(8, device="cuda").neg_()
    torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
"""
"""Runs out of memory within a capture, the end of which then raises an error of its own."""
TORCHRUN = ("--nnodes", "1", "--nproc-per-node", str(WORLD))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_explored(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def ended(folder: Path, script: Path) -> Ended:
    """As given it fits; the changes are one that fits, one that does not, one that is refused."""
    return fit(
        folder,
        *("--try", "--tp 2", "--try", "--eat 200", "--try", "--tp 3"),
        *("--assert", "reserved<1GiB", "--assert", "held>700GiB"),
        *("--markdown", folder / "fit.md", script, "--width", 32),
    )


def fit(folder: Path, *arguments: object) -> Ended:
    return prismscale(
        "fit", *TORCHRUN, "--out", folder / "out", "--json", folder / "fit.json", *arguments
    )


@pytest.fixture(scope="module")
def found(ended: Ended, folder: Path) -> dict[str, Any]:
    """What is written for programs."""
    data: dict[str, Any] = json.loads((folder / "fit.json").read_text())
    return data


def test_memory_is_that_of_the_whole_run(
    found: dict[str, Any], script: Path, tmp_path: Path
) -> None:
    """To the byte: allocated, reserved, and what lies outside torch."""
    command = ("--device", "null", "--world-size", WORLD, "--out", tmp_path / "run")
    done = prismscale("run", *command, script, "--width", 32)
    assert done.code == 0, done.err

    (stage,) = results(tmp_path / "run")["stages"]
    (seen,) = found["variants"][0]["stages"]
    assert seen["record"]["peak_bytes"] == stage["peak_bytes"]
    assert seen["record"]["reserved_bytes"] == stage["reserved_bytes"]
    assert seen["record"]["outside"] == stage["outside"]


def test_kinds_add_up_to_the_peak(found: dict[str, Any]) -> None:
    """Every byte that is allocated at the peak is of some kind, and the peak is the device's."""
    (stage,) = found["variants"][0]["stages"]
    peak = stage["peak"]

    assert sum(kind["n_bytes"] for kind in peak["kinds"]) == peak["allocated_bytes"]
    assert peak["allocated_bytes"] == stage["record"]["peak_bytes"]
    assert peak["reserved_bytes"] == stage["record"]["reserved_bytes"]
    assert {kind["kind"] for kind in peak["kinds"]} >= {"parameters", "library workspaces"}
    assert {kind["kind"] for kind in peak["kinds"]} <= set(KINDS)


def test_each_change_has_a_verdict(found: dict[str, Any]) -> None:
    """Of what runs out of memory it is told how much it needs; a refusal is told in the program's
    words."""
    given, fits, too_large, refused = found["variants"]

    assert given["fit"]["fits"]
    assert fits["fit"]["fits"]
    assert not too_large["fit"]["fits"]
    assert too_large["fit"]["held_bytes"] - given["fit"]["held_bytes"] == pytest.approx(
        200 * GIB, rel=0.01
    )
    assert refused["fit"] is None
    assert "no groups of 3" in refused["refused"]


def test_what_was_asserted_decides_the_exit_code(ended: Ended, folder: Path) -> None:
    """It fits, and one of the two conditions does not hold."""
    assert ended.code == 8
    assert "held>700GiB: held is" in ended.err
    assert "assertions do not hold" in (folder / "fit.md").read_text()


@pytest.mark.parametrize("text", ["step<1s", "hidden(dp)>0.9"])
def test_a_figure_that_fit_does_not_find_is_refused_before_anything_runs(
    folder: Path, script: Path, text: str
) -> None:
    """The verdict of minutes of captures is not lost for it."""
    done = fit(folder, "--assert", text, "--out", folder / "refused", script, "--width", 32)
    assert done.code == 2
    assert "it finds reserved, allocated, held, headroom" in done.err.replace("\n", " ")
    assert not (folder / "refused").exists()


def test_what_does_not_fit_ends_with_4(script: Path, tmp_path: Path) -> None:
    """And says what holds the memory, and where in the program."""
    done = fit(tmp_path, script, "--eat", 100)

    assert done.code == 4
    assert "does not fit" in done.err


def test_running_out_of_memory_is_told_whatever_the_program_dies_of_then(tmp_path: Path) -> None:
    """The capture's end raises: it has unjoined work."""
    script = tmp_path / "train.py"
    script.write_text(BROKEN_OFF)
    done = fit(tmp_path, script)

    assert done.code == 4, done.err
    assert "does not fit" in done.err


def test_one_step_is_enough_and_said(script: Path, tmp_path: Path) -> None:
    """Memory needs no second step to be compared with; what a second one might need is open."""
    markdown = tmp_path / "fit.md"
    done = fit(tmp_path, "--markdown", markdown, script, "--width", 32, "--steps", 1)

    assert done.code == 0, done.err
    assert "the program made one step" in done.out
    assert "the program made one step" in markdown.read_text()
    (stage,) = json.loads((tmp_path / "fit.json").read_text())["variants"][0]["stages"]
    assert stage["steps"] == 1
    assert stage["record"]["peak_bytes"] > 0


def test_a_program_whose_memory_repeats_ends_whatever_else_it_does(tmp_path: Path) -> None:
    """No step is like another; the third holds what the second held. One that grows goes on."""
    script = tmp_path / "train.py"
    script.write_text(RESTLESS)
    steps = {}
    for how in ("repeats", "grows"):
        done = fit(tmp_path / how, script, how)
        assert done.code == 0, done.err
        found = json.loads((tmp_path / how / "fit.json").read_text())["variants"][0]["stages"][0]
        steps[how] = found["steps"]
    assert steps == {"repeats": 3, "grows": 8}


def test_a_program_without_a_step_is_refused(script: Path, tmp_path: Path) -> None:
    """It tells nothing of training's memory."""
    done = fit(tmp_path, script, "--steps", 0)

    assert done.code == 2
    assert "ended after 0 optimizer calls, and a whole step is needed" in done.err


def test_ranks_that_are_named_are_looked_at(script: Path, tmp_path: Path) -> None:
    """Beside those of the stages."""
    assert fit(tmp_path, "--capture", WORLD - 1, script, "--width", 32).code == 0
    stages = json.loads((tmp_path / "fit.json").read_text())["variants"][0]["stages"]
    assert {stage["rank"] for stage in stages} == {0, WORLD - 1}


def test_what_holds_the_memory_is_shown(script: Path, tmp_path: Path) -> None:
    """With the line that asked for it."""
    done = prismscale("fit", *TORCHRUN, "--out", tmp_path / "out", script, "--eat", 10)

    assert done.code == 0, done.err
    assert "layouts.py:25" in done.out
    assert "10.00 GiB" in done.out


def test_stages_alike_are_not_captured_and_change_no_verdict(tmp_path: Path) -> None:
    """Of eight stages four are; the fullest GPU is that of the whole run, to the byte."""
    example = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
    model = ("--layers", 16, "--pp", 8, "--microbatches", 8, "--dtype", "bf16", "--seq-len", 128)
    paths = ("--out", tmp_path / "out", "--json", tmp_path / "fit.json")
    found = prismscale("fit", "--nproc-per-node", 8, *paths, example, *model)
    assert found.code == 0, found.err
    run = ("--device", "null", "--world-size", 8, "--out", tmp_path / "run")
    done = prismscale("run", *run, example, *model)
    assert done.code == 0, done.err

    given = json.loads((tmp_path / "fit.json").read_text())["variants"][0]
    assert [stage["rank"] for stage in given["stages"]] == [0, 1, 6, 7]
    assert given["between"] == [[2, 5]]
    assert "stages 2 to 5 not captured" in found.out
    stages = results(tmp_path / "run")["stages"]
    for quantity in ("peak_bytes", "reserved_bytes"):
        captured = max(stage["record"][quantity] for stage in given["stages"])
        assert captured == max(stage[quantity] for stage in stages)
