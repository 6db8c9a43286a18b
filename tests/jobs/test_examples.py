"""The example trainers, run by torchrun with real gloo processes on this machine.

Starting processes is what costs here, so all layouts share one torchrun, whose workers run the
unmodified script once per layout, each time in new process groups.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 600
GLOO_ENDS_BADLY = "terminate called without an active exception"
"""At exit one of gloo's threads may let go of a tensor when Python is gone (torch's pull request
179291). A program that leaves its groups to Python's end meets it in every sixth start on a busy
machine, after its last line; the examples free theirs. The second try is for what is left."""
PORTS_OF_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")

# Every layout sees the same four samples a step.
BATCH = "--model debug --device cpu --steps 3 --lr 1e-3"
CLIP = "--clip-grad 1"
LAYOUTS = {
    "reference": (1, f"--batch-size 4 {CLIP}"),
    "unclipped": (1, "--batch-size 4"),
    "accumulation": (1, f"--microbatches 4 {CLIP}"),
    "ddp": (2, f"--dp-mode ddp --microbatches 2 {CLIP}"),
    "fsdp2": (2, f"--microbatches 2 {CLIP}"),
    "fsdp2-bf16": (2, f"--batch-size 2 --dtype bf16 {CLIP}"),
    "tp": (2, f"--tp 2 --dp-mode none --batch-size 4 {CLIP}"),
    "sp": (2, f"--tp 2 --sequence-parallel --batch-size 4 {CLIP}"),
    "tp-bf16": (2, f"--tp 2 --batch-size 4 --dtype bf16 {CLIP}"),
    "1f1b": (2, f"--pp 2 --microbatches 4 {CLIP}"),
    "gpipe": (2, f"--pp 2 --microbatches 4 --schedule gpipe {CLIP}"),
    "interleaved": (2, f"--pp 2 --microbatches 4 --schedule interleaved {CLIP}"),
    "1f1b-bf16": (2, f"--pp 2 --microbatches 4 --dtype bf16 {CLIP}"),
    "tp-pp": (4, f"--tp 2 --pp 2 --microbatches 4 {CLIP}"),
    "tp-fsdp2": (4, f"--tp 2 --sequence-parallel --batch-size 2 {CLIP}"),
    "tp-ddp": (4, "--tp 2 --dp-mode ddp --microbatches 2"),
    "pp-ddp": (4, f"--pp 2 --microbatches 2 --dp-mode ddp {CLIP}"),
    "pp-fsdp2": (4, f"--pp 2 --microbatches 2 --schedule interleaved {CLIP}"),
    "tp-pp-fsdp2": (8, f"--tp 2 --pp 2 --sequence-parallel --microbatches 2 {CLIP}"),
    "moe": (1, f"--experts 8 --batch-size 4 {CLIP}"),
    "moe-ddp": (2, f"--experts 8 --dp-mode ddp --microbatches 2 {CLIP}"),
    "moe-fsdp2": (2, f"--experts 8 --microbatches 2 {CLIP}"),
    "moe-ep": (2, f"--experts 8 --ep 2 --microbatches 2 {CLIP}"),
    "moe-ep-edp": (4, f"--experts 8 --ep 2 {CLIP}"),
    "moe-pp-ep": (4, f"--experts 8 --pp 2 --ep 2 --microbatches 2 {CLIP}"),
    "moe-ep-bf16": (2, f"--experts 8 --ep 2 --batch-size 2 --dtype bf16 {CLIP}"),
    "moe-limit": (2, f"--experts 8 --capacity-factor 1.25 --batch-size 2 {CLIP}"),
    "moe-limit-ep": (2, f"--experts 8 --capacity-factor 1.25 --ep 2 --batch-size 2 {CLIP}"),
    "moe-no-limit-ep": (2, f"--experts 8 --capacity-factor 4 --ep 2 --batch-size 2 {CLIP}"),
    "moe-forced": (4, f"--experts 8 --ep 4 --force-balance 3 {CLIP}"),
}
FP32 = [name for name in LAYOUTS if "bf16" not in name and name != "moe-forced"]
BF16 = [name for name in LAYOUTS if "bf16" in name]


def reference_of(name: str) -> str:
    """The layout of fewer ranks that computes the same. A capacity is counted on each data-parallel
    rank, so it drops the same tokens only where these are as many."""
    if name.startswith("moe-limit"):
        return "moe-limit"
    if name.startswith("moe"):
        return "moe"
    return "reference" if CLIP in LAYOUTS[name][1] else "unclipped"


# Runs the script as `python train.py` would, once per layout in the layout's first ranks.
# torchrun's own store keeps the addresses of ended process groups, so each layout's rank 0 serves
# a new one on a port of its own. One file of output per layout and rank.
WORKER = """
import contextlib, json, os, pathlib, runpy, sys

script, layouts, folder = sys.argv[1], json.loads(sys.argv[2]), pathlib.Path(sys.argv[3])
rank = int(os.environ["RANK"])
sys.path[0] = os.path.dirname(script)
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
for name, world_size, options, port in layouts:
    if rank >= world_size:
        continue
    os.environ.update(WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    sys.argv = [script, *options.split()]
    with open(folder / f"{name}.{rank}", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a trainer printed, step by step."""

    losses: list[float]
    grad_norms: list[float]


def parse(output: str) -> Run:
    return Run(
        losses=[float(x) for x in re.findall(r"loss +(\S+)", output)],
        grad_norms=[float(x) for x in re.findall(r"grad norm +(\S+)", output)],
    )


def torchrun(world_size: int, script: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of a torchrun on this machine; leaves no process behind."""
    for _ in range(2):
        code, output = torchrun_once(world_size, script, *options)
        if GLOO_ENDS_BADLY not in output:
            break
    return code, output


def torchrun_once(world_size: int, script: Path, *options: str) -> tuple[int, str]:
    """As :func:`torchrun`, whatever torch does at its exit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world_size}", str(script), *options]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            # SIGTERM lets torchrun end its workers, which are in sessions of their own.
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    return process.returncode, output


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free when asked for, all different.

    They lie below those that the kernel gives to sockets that ask for none: until a layout's turn
    comes, one of the earlier layouts' many connections could be given its port.
    """
    kernels_first = int(PORTS_OF_THE_KERNEL.read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(1024, kernels_first), k=kernels_first - 1024):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What each layout printed."""
    folder = tmp_path_factory.mktemp("layouts")
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    layouts = [
        (name, world_size, f"{BATCH} {options}", port)
        for (name, (world_size, options)), port in zip(
            LAYOUTS.items(), free_ports(len(LAYOUTS)), strict=True
        )
    ]
    script = str(EXAMPLES / "llama" / "train.py")
    code, output = torchrun(8, worker, script, json.dumps(layouts), str(folder))
    assert code == 0, output
    return {
        name: parse("".join(file.read_text() for file in folder.glob(f"{name}.*")))
        for name in LAYOUTS
    }


@pytest.mark.parametrize("name", FP32)
def test_losses_do_not_depend_on_the_layout(runs: dict[str, Run], name: str) -> None:
    """Every layout's losses equal those of one process, through forward, backward and AdamW."""
    reference = runs[reference_of(name)]

    assert runs[name].losses == pytest.approx(reference.losses, rel=1e-5)


@pytest.mark.parametrize("name", BF16)
def test_bf16_follows_fp32(runs: dict[str, Run], name: str) -> None:
    """Computation in bf16 gives the fp32 losses and norms up to bf16's rounding."""
    reference = runs[reference_of(name)]

    assert runs[name].losses == pytest.approx(reference.losses, rel=1e-2)
    assert runs[name].grad_norms == pytest.approx(reference.grad_norms, rel=2e-2)


@pytest.mark.parametrize("name", [name for name in FP32 if CLIP in LAYOUTS[name][1]])
def test_gradient_norm_is_that_of_the_whole_model(runs: dict[str, Run], name: str) -> None:
    """Clipping sees one process's gradient norm, over tp, pp, dp and microbatches.

    AdamW hides a gradient that is wrong by a constant factor; its norm does not.
    """
    expected = runs[reference_of(name)].grad_norms

    assert len(expected) == 3
    assert runs[name].grad_norms == pytest.approx(expected, rel=1e-4)


def test_llama_learns(runs: dict[str, Run]) -> None:
    """The loss begins near that of a uniform guess and falls."""
    losses = runs["reference"].losses

    assert losses[0] == pytest.approx(math.log(256), rel=0.01)
    assert losses[-1] < losses[0]


def test_a_capacity_drops_what_is_beyond_it(runs: dict[str, Run]) -> None:
    """An untrained router is not balanced, so some tokens are not seen by all their experts."""
    assert runs["moe-limit"].losses != pytest.approx(runs["moe"].losses, rel=1e-5)


def test_a_forced_router_takes_other_experts(runs: dict[str, Run]) -> None:
    """And the model learns all the same."""
    losses = runs["moe-forced"].losses

    assert losses != pytest.approx(runs["moe"].losses, rel=1e-5)
    assert losses[-1] < losses[0]


def test_ddp_example_prints_a_line_per_step() -> None:
    """The minimal script prints step, loss and seconds once per step, from rank 0 only."""
    code, output = torchrun(2, EXAMPLES / "ddp" / "train.py", "--steps", "3")

    assert code == 0, output
    assert re.findall(r"^step +(\d+)  loss \d+\.\d+  \d+\.\d+ s$", output, re.M) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (6, "--tp 4 --pp 2", "world size 6 = dp ? × tp 4 × pp 2: not divisible"),
        (4, "--tp 2 --dp-mode none", "world size 4 = dp ? × tp 2 × pp 1: leaves dp 2"),
        (8, "--tp 2 --pp 2 --dp-mode ddp", "choose --dp-mode fsdp2"),
        (4, "--tp 2 --dp-mode ddp --clip-grad 1", "choose --dp-mode fsdp2"),
        (1, "--sequence-parallel", "give --tp 2 or more"),
        (16, "--tp 16", "kv-heads 8 / tp 16: not divisible"),
        (8, "--pp 8", "layers 4 are too few for 8 stages"),
        (4, "--pp 4 --microbatches 2", "microbatches 2 < pp 4"),
        (2, "--pp 2 --microbatches 5 --schedule interleaved", "is not a whole number"),
        (2, "--virtual-stages 2", "only with --schedule interleaved"),
        (1, "--hidden 60", "hidden 60 / heads 16: not divisible"),
        (1, "--steps 0", "0 is not 1 or more"),
        (4, "--log-rank 4", "not a rank of world size 4"),
        (4, "--ep 2", "give --experts"),
        (4, "--experts 8 --ep 3", "dp 4 / ep 3 is not a whole number"),
        (4, "--experts 6 --ep 4", "experts 6 / ep 4: not divisible"),
        (4, "--experts 8 --ep 2 --dp-mode ddp", "choose --dp-mode fsdp2"),
        (4, "--experts 8 --tp 2", "experts are not sharded over tp"),
        (4, "--experts 2 --top-k 3", "--top-k 3 of 2 experts"),
        (4, "--capacity-factor 1", "give --experts"),
        (4, "--experts 8 --ep 4 --force-balance 5", "from 0 to 4"),
    ],
)
def test_impossible_layouts_are_refused(
    llama_config: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    world_size: int,
    options: str,
    message: str,
) -> None:
    """Options that cannot work end the script with the reason, before any communication."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit) as exit_info:
        llama_config.parse_args(options.split())

    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "billions"),
    [("160m", 0.162), ("8b", 8.03), ("70b", 70.6), ("405b", 406), ("8x7b", 46.7)],
)
def test_named_models_have_their_published_size(
    llama_config: ModuleType, name: str, billions: float
) -> None:
    """Parameters counted from the shape agree with the published model."""
    model = llama_config.MODELS[name]
    attention = 2 * model.hidden * (model.hidden + model.kv_heads * model.head_dim)
    ffn = 3 * model.hidden * model.ffn * max(model.experts, 1) + model.hidden * model.experts
    block = attention + ffn + 2 * model.hidden
    total = 2 * model.vocab * model.hidden + model.layers * block + model.hidden

    assert total / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.fixture(scope="module")
def llama_config() -> ModuleType:
    """The trainer's config module, which does not import torch."""
    spec = importlib.util.spec_from_file_location("llama_config", EXAMPLES / "llama" / "config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
