"""A program for GPUs, captured on a device that is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.launcher import CaptureRunner
from prismscale.cluster import Cluster
from prismscale.errors import ScriptError
from prismscale.graph.trace import RankTrace
from support.runs import prismscale, results

WORLD = 4
TRAINER = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
dist.init_process_group("nccl")
layers = [nn.Linear(256, 256) for _ in range(6)]
model = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    began = time.perf_counter()
    busy = time.process_time() + 0.05
    while time.process_time() < busy:
        pass
    loss = model(torch.randn(4096, 256, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), "took", time.perf_counter() - began, flush=True)
"""
GRAPHED = """
import os
import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
data = torch.randn(4096, 256, device="cuda")

def step():
    optimizer.zero_grad(set_to_none=False)
    model(data).square().mean().backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    optimizer.step()

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    step()
for _ in range(20):
    graph.replay()
    print("loss", flush=True)
"""
WARMED_UP = GRAPHED.replace("    step()\ngraph", "    for _ in range(3):\n        step()\ngraph")
"""The fourth step is captured, as in Megatron-LM."""
EATER = """
import torch
held = [torch.empty(2**33, dtype=torch.uint8, device="cuda") for _ in range(40)]
"""
ADVISOR = """
import torch
try:
    held = [torch.empty(2**33, dtype=torch.uint8, device="cuda") for _ in range(40)]
except torch.OutOfMemoryError:
    raise RuntimeError("use a smaller batch")
"""


def spec(folder: Path, device: str, text: str = TRAINER) -> CaptureSpec:
    """One rank of four of a program in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    gpu = Cluster.load("h100-sxm").device
    return CaptureSpec(
        rank=1,
        world_size=WORLD,
        local_world_size=WORLD,
        target=str(folder / "train.py"),
        is_module=False,
        args=(),
        device=device,
        samples=1,
        step_marker=None,
        track_memory=True,
        communication_load=False,
        payloads=str(folder / "payloads"),
        out=str(folder),
        gpu=gpu,
    )


def captured(folder: Path, device: str, text: str = TRAINER) -> RankTrace:
    """The trace of rank 1."""
    runner = CaptureRunner(spec=spec(folder, device, text), logs=folder / "logs")
    runner.capture([1])
    return runner.traces[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("null")


@pytest.fixture(scope="module")
def on_null(folder: Path) -> RankTrace:
    return captured(folder / "null", "null")


def communications(trace: RankTrace) -> list[tuple[int, int, int]]:
    """Of a steady step: operation, bytes, group index."""
    nodes = trace.communications(trace.n_prologue, trace.n_nodes)
    return [(int(trace.op_N[n]), int(trace.bytes_N[n]), int(trace.group_index_N[n])) for n in nodes]


def test_the_step_communicates_as_on_a_processor(on_null: RankTrace, folder: Path) -> None:
    """The same operations, bytes and groups, in the same order."""
    assert communications(on_null) == communications(captured(folder / "cpu", "cpu"))


def test_time_and_memory_are_said_to_be_modelled(on_null: RankTrace) -> None:
    """And memory holds parameters, gradients, their buckets and the optimizer's state."""
    assert on_null.facts.modelled
    assert on_null.memory is not None
    assert on_null.memory.source == "modelled"
    parameter_bytes = 6 * (256 * 256 + 256) * 4
    assert on_null.memory.peak_bytes > 5 * parameter_bytes


def test_host_and_stream_have_lanes_of_their_own(on_null: RankTrace) -> None:
    """Reading the loss makes the host wait for the stream, and the next step's launches for it."""
    assert on_null.lanes[:2] == ("host", "stream 0")
    labels = {on_null.labels[i] for i in on_null.label_N[on_null.n_prologue :]}
    assert {"forward", "backward", "backward, host"} <= labels


def steps_run(folder: Path, rank: int) -> int:
    """Steps that a captured rank said it has done."""
    return (folder / "logs" / f"capture-rank-{rank}.log").read_text().count("loss")


@pytest.mark.parametrize(("differs", "saved"), [("", 1), ("[: 1 + rank]", 0)])
def test_a_rank_that_does_the_same_ends_a_step_earlier(
    tmp_path: Path, differs: str, saved: int
) -> None:
    """With the same trace; one that does something else is captured to the end."""
    extra = f"\n    rank = dist.get_rank()\n    dist.all_reduce(torch.ones(9){differs})\n"
    text = TRAINER.replace("\n    optimizer.zero_grad()\n", extra + "    optimizer.zero_grad()\n")
    job = replace(spec(tmp_path, "null", text), rank=0)
    runner = CaptureRunner(spec=job, logs=tmp_path / "logs", jobs=1)
    runner.capture([0, 2])
    first, second = runner.traces[0], runner.traces[2]
    assert (first.fingerprint() == second.fingerprint()) == bool(saved)
    assert steps_run(tmp_path, 0) - steps_run(tmp_path, 2) == saved
    assert second.memory is not None
    assert first.memory is not None
    assert second.memory.peak_bytes == first.memory.peak_bytes
    assert second.groups[0].ranks == tuple(range(WORLD))


def test_the_programs_timers_read_logical_time(on_null: RankTrace, folder: Path) -> None:
    """Python's own time passes for nobody; the modelled kernels' does."""
    log = (folder / "null" / "logs" / "capture-rank-1.log").read_text()
    took = [float(line.split()[-1]) for line in log.splitlines() if line.startswith("loss")]
    assert 1e-4 < took[-1] < 0.05


def test_out_of_memory_says_who_holds_it(tmp_path: Path) -> None:
    """The program gets torch's error; the report names sizes and ops."""
    with pytest.raises(ScriptError, match="CUDA out of memory") as caught:
        captured(tmp_path, "null", EATER)
    assert "before the first optimizer call" in (caught.value.traceback or "")
    assert "8,192.0 MiB" in (caught.value.traceback or "")


def test_what_a_program_says_of_its_lack_of_memory_is_shown(tmp_path: Path) -> None:
    """It is told as lack of memory; its own words stand below."""
    with pytest.raises(ScriptError, match="CUDA out of memory") as caught:
        captured(tmp_path, "null", ADVISOR)
    assert "RuntimeError: use a smaller batch" in (caught.value.traceback or "")


def test_a_job_ends_in_a_report(tmp_path: Path) -> None:
    """From the command line: sources, kernels, and values that were made up."""
    program = spec(tmp_path, "null").target
    done = prismscale(
        *("run", "--device", "null", "--world-size", 2, "--out", tmp_path / "run", program)
    )
    assert done.code == 0, done.err
    assert "computation, modelled for h100-sxm" in done.out
    found = results(tmp_path / "run")
    stage = found["stages"][0]
    assert stage["memory_source"] == "modelled"
    assert stage["reserved_bytes"] >= stage["peak_bytes"]
    assert {"CUDA context"} < {part["name"] for part in stage["outside"]}
    assert "Outside torch" in done.out
    assert "gemm" in {kernel["kind"] for kernel in found["kernels"]}
    assert any("train.py" in use["call_site"] for use in found["values"])


def test_a_live_rank_observes_what_was_predicted(tmp_path: Path) -> None:
    """Both come from one model, so they are equal but for rounding."""
    program = spec(tmp_path, "null").target
    options = ("--device", "null", "--world-size", 2, "--live", "1", "--steps", 3)
    done = prismscale("run", *options, "--out", tmp_path / "run", program)
    assert done.code == 0, done.err
    found = results(tmp_path / "run")
    (live,) = found["live"]
    assert live["median_step_ns"] == pytest.approx(found["step_ns"], rel=1e-4)


def test_a_gpu_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """Before anything starts, with the names that are allowed."""
    program = spec(tmp_path, "null").target
    options = ("--device", "null", "--cluster", "loopback-gloo", "--out", tmp_path / "run")
    done = prismscale("run", *options, "--world-size", 2, program)
    assert done.code != 0
    assert "cannot pretend to be 'CPU'" in done.err
    assert "NVIDIA H100 80GB HBM3" in done.err


@pytest.fixture(scope="module")
def of_a_graph(tmp_path_factory: pytest.TempPathFactory) -> RankTrace:
    return captured(tmp_path_factory.mktemp("graph"), "null", GRAPHED)


def test_a_replayed_step_is_the_eager_step(of_a_graph: RankTrace, tmp_path: Path) -> None:
    """Optimizer and communications lie in the graph: the same sequence, lanes and phases, and a
    host that hardly works."""
    eager = captured(tmp_path, "null", GRAPHED.replace("graph.replay()", "step()"))
    assert communications(of_a_graph) == communications(eager)
    assert of_a_graph.lanes == eager.lanes
    body = slice(of_a_graph.n_prologue, None)
    labels = {of_a_graph.labels[i] for i in of_a_graph.label_N[body]}
    assert {"forward", "backward", "optimizer"} <= labels
    lane_N = of_a_graph.lane_N[body]
    assert of_a_graph.body_ns_SB[0][lane_N == 0].sum() < 10_000


def test_the_peak_of_a_graph_is_that_of_its_pool(of_a_graph: RankTrace, tmp_path: Path) -> None:
    """No replay allocates, so the peak is where the step was captured, beside what lives on."""
    once = captured(tmp_path, "null", GRAPHED.replace("range(20)", "range(9)"))
    assert of_a_graph.memory is not None
    assert once.memory is not None
    assert of_a_graph.memory.peak_bytes == once.memory.peak_bytes
    assert of_a_graph.memory.step_peak_bytes[-1] < of_a_graph.memory.peak_bytes


@pytest.mark.parametrize("text", [GRAPHED, WARMED_UP], ids=["at once", "after a warm-up"])
def test_a_live_rank_of_a_graph_observes_what_was_predicted(text: str, tmp_path: Path) -> None:
    """Each replay meets the other ranks where its communications are; no event is told of."""
    program = spec(tmp_path, "null", text).target
    options = ("--device", "null", "--world-size", 2, "--live", "1", "--steps", 3)
    done = prismscale("run", *options, "--out", tmp_path / "run", program)
    assert done.code == 0, done.err
    found = results(tmp_path / "run")
    assert not found["events"]
    (live,) = found["live"]
    assert live["median_step_ns"] == pytest.approx(found["step_ns"], rel=1e-4)


@pytest.mark.parametrize("watched_steps", [0, 12])
def test_steps_before_a_graph_are_warm_up(
    watched_steps: int, of_a_graph: RankTrace, tmp_path: Path
) -> None:
    """However equal they are: the step is a replay, memory that of the graph, and the capture comes
    once. A rank that is not watched waits for a graph that the program has made ready for."""
    asked = "graphsafe = torch.cuda.default_generators[0].graphsafe_get_state()\n"
    program = WARMED_UP.replace("data =", (asked if not watched_steps else "") + "data =")
    one = replace(spec(tmp_path, "null", program), watched_steps=watched_steps)
    runner = CaptureRunner(spec=one, logs=tmp_path / "logs")
    runner.capture([1])
    trace = runner.traces[1]
    lane_N = trace.lane_N[trace.n_prologue :]
    assert trace.body_ns_SB[0][lane_N == 0].sum() < 10_000
    assert trace.facts.unusual_steps == 0
    assert trace.facts.calls_in_prologue > 3
    assert trace.memory is not None
    assert of_a_graph.memory is not None
    assert trace.memory.reserved_bytes == of_a_graph.memory.reserved_bytes
