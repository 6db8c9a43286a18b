"""One step for one run: at any logging frequency, and by every command.

    python bench/one_truth.py [--part logging|events|forecast|gloo|scale]… [--json PATH]

Run with a Python that has torchtitan 0.3.0, megatron-core 0.16.1, accelerate, transformers and
DeepSpeed beside prismscale (``make test-frameworks`` makes one); a program whose package is missing
is left out, and said so. Everything goes through the command line.

- ``logging``: a program's step where it logs every step, and every 2nd, 3rd, 10th and 100th.
- ``events``: evaluation, checkpoints, a profiler's window and a GradScaler, with live ranks at 64
  ranks; and the program's own tokens per second beside the predicted step.
- ``forecast``: with variation off, p50 and p95 of ``forecast``, and where ``sensitivity`` and
  ``place`` start, less the step of ``run``; what changes after a capture beside a run made so.
- ``gloo``: a real job of two ranks, and the forecast made of its capture.
- ``scale``: 1,000 draws of a null torchtitan job at 8,192 ranks and at 512.

PATH keeps the rows of parts that a run leaves out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from null_programs import PARTIAL, prepare
from one_truth_gloo import compare
from prismscale.analysis.rows import Row, finish, read_rows, write_rows
from prismscale.cluster import Cluster
from prismscale.cost.kernel_measured import KernelTable, MeasuredKernel

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
LOOP = HERE / "programs" / "fsdp_events.py"
LIMIT_S = 900
FREQUENCIES = (1, 2, 3, 10, 100)
WORLD = 64


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program that logs as often as asked."""

    name: str
    package: str
    world_size: int
    script: Path
    args: tuple[str, ...]
    log_option: str
    logs: str = "%d"
    """How the option's value is written."""


def titan(name: str, world_size: int, config: str, *more: str) -> Program:
    """torchtitan with a real model's shape."""
    return Program(
        name=f"torchtitan {name}",
        package="torchtitan",
        world_size=world_size,
        script=HERE / "titan_train.py",
        args=(
            *("--module", "titan_configs", "--config", config),
            *("--hf_assets_path", "./tokenizer", "--dataloader.dataset", "c4_test"),
            *PARTIAL,
            *("--training.steps", "400", *more),
        ),
        log_option="--metrics.log_freq",
    )


def example(name: str, package: str, world_size: int, folder: str, options: str) -> Program:
    """One of the examples."""
    return Program(
        name=name,
        package=package,
        world_size=world_size,
        script=EXAMPLES / folder / "train.py",
        args=tuple(options.split()),
        log_option="--log-every",
    )


PROGRAMS = (
    Program(
        name="own FSDP2 loop",
        package="torch",
        world_size=WORLD,
        script=LOOP,
        args=("--steps", "200"),
        log_option="--log-every",
    ),
    example("DDP", "torch", WORLD, "ddp", "--hidden 4096 --batch-size 8192 --steps 200"),
    titan("8B", 8, "llama3_8b_2024", "--training.local_batch_size", "1"),
    titan("70B, TP 8", 64, "llama3_70b", "--parallelism.tensor_parallel_degree", "8"),
    example(
        "Megatron, TP 2 PP 2",
        "megatron",
        WORLD,
        "megatron",
        """--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16
        --micro-batch-size 1 --train-iters 200 --vocab-size 32000 --attention-dropout 0
        --no-masked-softmax-fusion --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --global-batch-size 128""",
    ),
    example(
        "DeepSpeed ZeRO-3",
        "deepspeed",
        16,
        "deepspeed",
        """--steps 200 --zero 3 --layers 4 --hidden 1024 --heads 16 --seq-length 1024
        --vocabulary 32000""",
    ),
    example(
        "Hugging Face, accelerate, FSDP2",
        "accelerate",
        16,
        "accelerate",
        "--steps 200 --bf16 --layers 4 --hidden 1024 --heads 16 --seq-length 1024",
    ),
)


class Runs:
    """Runs commands in one folder; a run with the same arguments is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, out: str, options: Sequence[object], script: Sequence[object]) -> dict[str, Any]:
        """``prismscale run``; its results, empty where it failed."""
        root = self.folder / out
        if not (root / "results.json").exists():
            done = self.command("run", *options, "--out", root, *script)
            if done.returncode:
                print(f"{out}:", done.stderr[-2000:], sep="\n", file=sys.stderr)
                return {}
        return json.loads((root / "results.json").read_text())

    def null(
        self, out: str, world_size: int, script: Sequence[object], *more: object
    ) -> dict[str, Any]:
        """On null H100s."""
        fixed = ("--device", "null", "--cluster", "h100-sxm", "--world-size", world_size)
        return self.run(out, (*fixed, *more), script)

    def command(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """One command."""
        return subprocess.run(
            [sys.executable, "-m", "prismscale.cli", *map(str, arguments)],
            cwd=self.folder,
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
            check=False,
        )


def logging_rows(runs: Runs) -> list[Row]:
    """The step at each frequency over the step where every step logs."""
    rows = []
    for program in PROGRAMS:
        if importlib.util.find_spec(program.package) is None:
            print(f"left out, {program.package} is not installed: {program.name}")
            continue
        step_ns = {}
        for every in FREQUENCIES:
            found = runs.null(
                f"log-{program.name}-{every}".replace(" ", "-").replace(",", ""),
                program.world_size,
                (program.script, *program.args, program.log_option, every),
            )
            step_ns[every] = found.get("step_ns", 0)
        usual = step_ns[10]
        rows.append(Row.told(f"{program.name}: step, logging every 10", usual / 1e6, "ms"))
        for every in (n for n in FREQUENCIES if n != 10):
            off = (
                abs(step_ns[every] / usual - 1) * 100 if usual and step_ns[every] else float("nan")
            )
            name = f"{program.name}: logging every {every} against every 10"
            rows.append(Row.at_most(name, off, 0.5, "%"))
        print(*(f"{r.name}: {r.value:g} {r.unit}" for r in rows[-5:]), sep="\n", flush=True)
    return rows


EVENTS: dict[str, tuple[str, ...]] = {
    "evaluation every 5": ("--eval-every", "5"),
    "checkpoint every 4": ("--save-every", "4"),
    "asynchronous checkpoint every 4": ("--save-every", "4", "--save", "async"),
    "evaluation every 5, checkpoint every 4": ("--eval-every", "5", "--save-every", "4"),
    "learning rate every 3": ("--lr-every", "3"),
    "profiler's window": ("--profile",),
}


def event_rows(runs: Runs) -> list[Row]:
    """Complete, with the base step of the run without, and listed with a cost."""
    never = ("--log-every", "0", "--steps", "60")
    rows = []
    plain = runs.null("events-plain", WORLD, (LOOP, *never), "--live", "0,8")
    scaled = runs.null("events-scaler", WORLD, (LOOP, *never, "--scaler"), "--live", "0,8")
    rows.append(Row.at_least("GradScaler: complete, live", float(bool(scaled)), 1))
    for name, options in EVENTS.items():
        folder = "events-" + re.sub(r"\W+", "-", name)
        found = runs.null(folder, WORLD, (LOOP, *never, *options), "--live", "0,8")
        rows.append(Row.at_least(f"{name}: complete, live", float(bool(found)), 1))
        if not found:
            continue
        off = abs(found["step_ns"] / plain["step_ns"] - 1) * 100
        rows.append(Row.at_most(f"{name}: base step against the run without", off, 0.5, "%"))
        for live in found["live"]:
            gone = abs(live["median_step_ns"] / live["predicted_step_ns"] - 1) * 100
            rows.append(Row.at_most(f"{name}: live rank {live['rank']}", gone, 0.5, "%"))
        for event in found["events"]:
            told = f"{name}: every {event['every']} steps"
            rows.append(Row.told(told, event["extra_ns"] / 1e6, "ms more"))
        drawn = forecast(runs, folder)
        rows.append(Row.at_most(f"{name}: forecast against run", differs(found, drawn), 0, "ns"))
    rows += own_rate_rows(runs)
    return rows


def own_rate_rows(runs: Runs) -> list[Row]:
    """The program's own tokens per second, over ten steps at a time, beside the predicted step."""
    rows = []
    for every in (1, 10):
        options = ("--log-every", every, "--steps", 200)
        found = runs.null(f"rate-{every}", WORLD, (LOOP, *options), "--live", "0", "--steps", 120)
        log = (runs.folder / f"rate-{every}" / "logs" / "live-rank-0.log").read_text()
        rates = [float(text) for text in re.findall(r"tokens/s ([\d.]+)", log)][2:]
        own_ns = 8192e9 / statistics.mean(rates) if len(rates) >= 10 else float("nan")
        off = abs(own_ns / found["step_ns"] - 1) * 100
        rows.append(
            Row.at_most(
                f"own tokens/s over {len(rates)} lines, logging every {every}", off, 0.5, "%"
            )
        )
    return rows


def forecast(runs: Runs, folder: str, *options: object) -> dict[str, Any]:
    """What ``prismscale forecast`` leaves with variation off."""
    runs.command("forecast", folder, "--variability", "none", "--draws", 20, *options)
    return section(runs, folder, "step")


def section(runs: Runs, folder: str, name: str) -> dict[str, Any]:
    """A part of a run's forecast."""
    results = json.loads((runs.folder / folder / "results.json").read_text())
    return results.get("forecast", {}).get(name, {})


def differs(found: dict[str, Any], drawn: dict[str, Any]) -> float:
    """The farther of p50 and p95 from run's step, in ns."""
    if not found or not drawn:
        return float("nan")
    quantiles = (drawn["quantiles_ns"][q]["value"] for q in ("0.5", "0.95"))
    return max(abs(q - found["step_ns"]) for q in quantiles)


def forecast_rows(runs: Runs) -> list[Row]:
    """Every command starts from run's step."""
    rows = []
    for name, make in user_runs(runs).items():
        folder = "user-" + re.sub(r"\W+", "-", name)
        found = make(folder)
        if not found:
            rows.append(Row.at_most(f"{name}: forecast against run", float("nan"), 0, "ns"))
            continue
        rows.append(Row.told(f"{name}: step", found["step_ns"] / 1e6, "ms"))
        off = differs(found, forecast(runs, folder))
        rows.append(Row.at_most(f"{name}: forecast p50 and p95 against run", off, 0, "ns"))
        rows += other_commands(runs, name, folder, found)
        print(*(f"{r.name}: {r.value:g} {r.unit}" for r in rows[-4:]), sep="\n", flush=True)
    return rows + what_if_rows(runs) + import_rows(runs)


def user_runs(runs: Runs) -> dict[str, Callable[[str], dict[str, Any]]]:
    """Runs as users make them; those of packages that are missing left out."""
    llama = EXAMPLES / "llama" / "train.py"
    demo = [
        "--model",
        "debug",
        "--tp",
        "8",
        "--pp",
        "4",
        "--dp-mode",
        "fsdp2",
        "--microbatches",
        "8",
        "--steps",
        "40",
    ]
    by_name = {p.name: p for p in PROGRAMS}

    def of(program: Program, every: int = 10) -> Callable[[str], dict[str, Any]]:
        script = (program.script, *program.args, program.log_option, every)
        return lambda folder: runs.null(folder, program.world_size, script)

    found: dict[str, Callable[[str], dict[str, Any]]] = {
        "README's demo, CPU, 1,024 ranks": lambda folder: runs.run(
            folder, ("--world-size", 1024, "--cluster", "h100-sxm"), (llama, *demo)
        ),
        "llama, CPU, scaled and slow": lambda folder: runs.run(
            folder,
            ("--world-size", 64, "--compute-scale", 0.2, "--slow", "3=2.0"),
            (llama, "--model", "debug", "--tp", 8, "--pp", 2, "--microbatches", 4, "--steps", 40),
        ),
        "DDP, null": of(by_name["DDP"]),
        "own FSDP2 loop, null, live": lambda folder: runs.null(
            folder, WORLD, (LOOP, "--log-every", 10), "--live", "0,8"
        ),
        "torchtitan 70B, 256 ranks": lambda folder: runs.null(
            folder, 256, (HERE / "titan_train.py", *by_name["torchtitan 70B, TP 8"].args)
        ),
        "torchtitan 8B, 64 ranks, TP 8": lambda folder: runs.null(
            folder,
            64,
            (
                *(HERE / "titan_train.py", *titan("8B", 64, "llama3_8b_whole_loss").args),
                *("--parallelism.tensor_parallel_degree", 8),
            ),
        ),
        "torchtitan 8B, 8,192 ranks": wide(runs, 8192),
        "DeepSpeed ZeRO-3": of(by_name["DeepSpeed ZeRO-3"]),
        "Megatron, TP 2 PP 2": of(by_name["Megatron, TP 2 PP 2"]),
    }
    needs = {"torchtitan": "torchtitan", "DeepSpeed": "deepspeed", "Megatron": "megatron"}
    missing = [k for k, package in needs.items() if importlib.util.find_spec(package) is None]
    return {n: make for n, make in found.items() if not n.startswith(tuple(missing) or ("\0",))}


def wide(runs: Runs, world_size: int) -> Callable[[str], dict[str, Any]]:
    """torchtitan 8B, TP 8, FSDP 64, replicated over the rest."""
    replicas = world_size // 512
    script = (
        *(HERE / "titan_train.py", *titan("8B", 8, "llama3_8b_whole_loss").args),
        *("--parallelism.tensor_parallel_degree", 8),
        *("--parallelism.data_parallel_replicate_degree", replicas),
        *("--training.local_batch_size", 1, "--metrics.log_freq", 10),
    )
    return lambda folder: runs.null(folder, world_size, script)


def other_commands(runs: Runs, name: str, folder: str, found: dict[str, Any]) -> list[Row]:
    """Where ``sensitivity`` and ``place`` start."""
    rows = []
    runs.command("sensitivity", folder, "--draws", 4, "--no-indices")
    (runs.folder / "even.csv").write_text(
        "node,factor\n" + "".join(f"n{i},1.0\n" for i in range(found["world_size"] // 8))
    )
    place = ("--nodes", "even.csv", "--ranks-per-node", 8, "--rounds", 1, "--draws", 4)
    runs.command("place", folder, *place)
    for command, part in (("sensitivity", "sensitivity"), ("place", "placement")):
        start = section(runs, folder, part).get("step_without_variation_ns", float("nan"))
        off = abs(start - found["step_ns"])
        rows.append(Row.at_most(f"{name}: {command} starts from run's step", off, 0, "ns"))
    return rows


def what_if_rows(runs: Runs) -> list[Row]:
    """What is changed in the forecast beside a run that was made so."""
    script = (LOOP, "--log-every", 10)
    changes = {
        "--slow": (("--slow", "3=1.7"), ("--slow", "3=1.7")),
        "--compute-scale": (("--compute-scale", 0.6), ("--compute-scale", 0.6)),
        "another --cluster": (("--cluster", "ours.toml"), ("--cluster", "ours.toml")),
        "--kernels": (("--kernels", "kernels.json"), ("--kernels", "kernels.json")),
    }
    slow_links(runs)
    own_kernels(runs)
    runs.null("what-if-plain", WORLD, script)
    rows = []
    b200 = runs.run(
        "what-if-b200", ("--device", "null", "--cluster", "b200", "--world-size", WORLD), script
    )
    drawn = forecast(runs, "what-if-plain", "--cluster", "b200")
    rows.append(
        Row.at_most("another GPU, given to run or to its forecast", differs(b200, drawn), 0, "ns")
    )
    for name, (given, changed) in changes.items():
        made = runs.null(f"what-if-{name.strip('-').replace(' ', '-')}", WORLD, script, *given)
        drawn = forecast(runs, "what-if-plain", *changed)
        rows.append(
            Row.at_most(f"{name}, given to run or to its forecast", differs(made, drawn), 0, "ns")
        )
    return rows


def own_kernels(runs: Runs) -> None:
    """A table of measured kernels: matrix products that take 9 µs each, whatever their shape."""
    table = KernelTable(
        device=Cluster.load("h100-sxm").device.name,
        torch="made up for a bench",
        date="2026-01-01",
        kernels=(MeasuredKernel(signature="aten::mm", device_ns=9000, host_ns=4000, spread=0.0),),
    )
    table.save(runs.folder / "kernels.json")


def slow_links(runs: Runs) -> None:
    """A cluster of the same GPUs with a tenth of the network."""
    h100 = Cluster.load("h100-sxm")
    link = replace(
        h100.inter_node, bandwidth_bytes_per_s=h100.inter_node.bandwidth_bytes_per_s / 10
    )
    text = replace(h100, name="ours", inter_node=link).to_toml()
    (runs.folder / "ours.toml").write_text(text)


def import_rows(runs: Runs) -> list[Row]:
    """An imported straggler trace: the median of its re-timed steps."""
    truth = Path(os.environ.get("PRISMSCALE_TRUTH", HERE.parent.parent / "shared" / "truth"))
    traces = sorted((truth / "straggler").glob("trace-*.parquet"))
    rows = []
    for trace in traces:
        folder = f"import-{trace.stem}"
        runs.command("import", "straggler", trace, "--out", folder)
        drawn = forecast(runs, folder)
        off = differs({"step_ns": drawn.get("step_without_variation_ns", 0)}, drawn)
        rows.append(Row.at_most(f"import {trace.stem}: forecast against its step", off, 0, "ns"))
    return rows


def scale_rows(runs: Runs) -> list[Row]:
    """1,000 draws of a null torchtitan job."""
    rows = []
    if importlib.util.find_spec("torchtitan") is None:
        print("left out, torchtitan is not installed: scale")
        return rows
    for world_size, bar in ((8192, 120.0), (65536, None)):
        found = wide(runs, world_size)(f"scale-{world_size}")
        if not found:
            rows.append(
                Row.at_most(f"{world_size:,} ranks: 1,000 draws", float("nan"), bar or 0, "s")
            )
            continue
        began = time.monotonic()
        runs.command("forecast", f"scale-{world_size}", "--draws", 1000)
        seconds = time.monotonic() - began
        name = f"torchtitan 8B, {world_size:,} ranks: 1,000 draws"
        rows.append(Row.at_most(name, seconds, bar, "s") if bar else Row.told(name, seconds, "s"))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 2**30
        rows.append(Row.at_most(f"{world_size:,} ranks: largest process so far", peak, 8, "GiB"))
    wide(runs, 512)("scale-512")
    drawn = []
    for option in ("--fuse", "--no-fuse"):
        runs.command("forecast", "scale-512", "--draws", 200, option)
        drawn.append(section(runs, "scale-512", "step")["step_ns"])
    apart = sum(a != b for a, b in zip(*drawn, strict=True))
    rows.append(Row.at_most("512 ranks: draws that differ, fused and not", apart, 0))
    return rows


def gloo_rows(runs: Runs) -> list[Row]:
    """A real two-rank job and the forecast of its capture; see ``one_truth_gloo``."""
    return compare(runs.folder)


PARTS: dict[str, Callable[[Runs], list[Row]]] = {
    "logging": logging_rows,
    "events": event_rows,
    "forecast": forecast_rows,
    "scale": scale_rows,
    "gloo": gloo_rows,
}


def main() -> int:
    """Run the parts, print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    options = parser.parse_args()
    chosen = options.part or list(PARTS)
    rows = [r for r in read_rows(options.json) if r.name.split(" | ")[0] not in chosen]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("tokenizers") and not (folder / "tokenizer").exists():
            prepare(folder)
            longer(folder)
        for part in chosen:
            found = PARTS[part](Runs(folder))
            rows += [
                Row(name=f"{part} | {r.name}", value=r.value, unit=r.unit, bar=r.bar, ok=r.ok)
                for r in found
            ]
            if options.json:
                write_rows(rows, options.json)
    return finish(rows, title="One step for one run", json_path=options.json)


def longer(folder: Path) -> None:
    """Text for thousands of ranks: torchtitan gives each rank documents of its own."""
    for path in folder.glob("tests/assets/*/data.json"):
        text = path.read_text()
        path.write_text(text * 200)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
