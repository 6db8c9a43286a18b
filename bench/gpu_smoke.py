"""What to measure whenever an NVIDIA GPU is at hand: one command, under eight minutes an item.

    python bench/gpu_smoke.py [--items run,overhead,memory,null,release] [--null-python PATH]

Writes ``bench/results/<gpu>/<item>.json`` with date, GPU, driver, torch version and command.
Exit code 2 where there is no GPU.

run       ``prismscale run --device cuda``, Llama 1B, world sizes 1, 8 and 1,024, rank 0 live
overhead  emulated against plain training on this GPU, taking turns: ratio of step times
memory    2 and 4 real processes on this GPU against a live rank: peak bytes, equal to the byte
null      the same program on the null device (``--null-python``: one with CPU-only torch)
release   held streams: how late they go on, asked for 50 µs to 50 ms
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from prismscale.devices.cuda import CudaStreams, require_cuda, start_cuda
from prismscale.errors import UsageError
from prismscale.files import write_json
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.live.pacer.client import PacerLink
from prismscale.live.pacer.cuda_words import CudaSignals
from prismscale.live.pacer.shared_words import Points, Record, SharedWords, WordKind
from prismscale.validation.rows import Row, print_rows

HERE = Path(__file__).parent
SCRIPT = str(HERE.parent / "examples" / "llama" / "train.py")
LARGE = ("--model", "1b", "--dtype", "bf16", "--seq-len", "2048", "--steps", "40")
SMALL = ("--model", "160m", "--dtype", "bf16", "--seq-len", "1024", "--steps", "40")
PAIRS = 3
ASKED_NS = (50_000, 200_000, 1_000_000, 10_000_000, 50_000_000)
REPEATS = 100


def main() -> int:
    """Run the items that were asked for."""
    items: dict[str, Callable[[argparse.Namespace, Path], list[Row]]] = {
        "run": measure_run,
        "overhead": measure_overhead,
        "memory": measure_memory,
        "null": measure_null,
        "release": measure_release,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", default="run,overhead,memory,release")
    parser.add_argument("--null-python", default="", help="an interpreter with CPU-only torch")
    options = parser.parse_args()
    unknown = set(options.items.split(",")) - set(items)
    if unknown:
        parser.error(f"no such item: {', '.join(sorted(unknown))}; there are {', '.join(items)}")
    try:
        require_cuda()
    except UsageError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return error.exit_code
    about = describe_machine()
    folder = HERE / "results" / re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    missed = False
    for item in options.items.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            rows = items[item](options, Path(scratch))
        print_rows(rows, title=f"{item}, {about['gpu']}")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{item}.json", {**about, "rows": [asdict(row) for row in rows]})
        missed |= not all(row.ok for row in rows)
    return int(missed)


def describe_machine() -> dict[str, str]:
    """What every result says about where it comes from."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.split("\n")[0] or "unknown",
        "torch": torch.__version__,
        "command": " ".join(["python", "bench/gpu_smoke.py", *sys.argv[1:]]),
    }


def emulate(world_size: int, out: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """``prismscale run`` with rank 0 live; what ``results.json`` and the live rank's file hold."""
    command = [sys.executable, "-m", "prismscale.cli", "run", "--device", "cuda", "--live", "0"]
    command += ["--world-size", str(world_size), "--steps", "12", "--out", str(out)]
    began = time.monotonic()
    subprocess.run([*command, SCRIPT, *arguments], check=True)
    results = json.loads((out / "results.json").read_text())
    results["command_s"] = time.monotonic() - began
    observed = next((out / "live").glob("*/live-0.json"))
    results["observed"] = json.loads(observed.read_text())
    return results


def train_plainly(
    n_ranks: int, scratch: Path, arguments: Sequence[str], *options: str
) -> list[dict[str, Any]]:
    """The program itself, ``n_ranks`` processes on this GPU; what each saw."""
    children = []
    for rank in range(n_ranks):
        places = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": n_ranks, "MASTER_PORT": 29511}
        environment = {name: str(value) for name, value in places.items()}
        environment |= {"LOCAL_WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1"}
        out = scratch / f"plain-{rank}.json"
        command = [sys.executable, str(HERE / "gpu_program.py"), str(out), *options]
        command += ["--", SCRIPT, *arguments]
        children.append((out, subprocess.Popen(command, env=os.environ | environment)))
    codes = [child.wait() for _, child in children]
    if any(codes):
        raise SystemExit(f"a plain rank failed: exit codes {codes}")
    return [json.loads(out.read_text()) for out, _ in children]


def measure_run(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Item 1, first half."""
    rows = []
    for world_size in (1, 8, 1024):
        found = emulate(world_size, scratch / str(world_size), [*LARGE, "--dp-mode", "fsdp2"])
        live = found["live"][0]
        name = f"world {world_size:,}"
        rows += [
            Row.told(f"{name}: live step", live["median_step_ns"] / 1e6, "ms"),
            Row.told(f"{name}: predicted step", live["predicted_step_ns"] / 1e6, "ms"),
            Row.told(f"{name}: lag in a step", live["lag_ns"] / 1e6, "ms"),
            Row.told(f"{name}: peak allocated", live["peak_bytes"] / 2**30, "GiB"),
            Row.told(f"{name}: command", found["command_s"], "s"),
        ]
    return rows


def measure_overhead(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Item 1, second half."""
    ratios = []
    for n in range(PAIRS):
        plain = train_plainly(1, scratch, [*LARGE, "--dp-mode", "ddp"], "--steps", "16")[0]
        found = emulate(1, scratch / str(n), [*LARGE, "--dp-mode", "ddp"])
        live = found["live"][0]
        emulated_ns = live["median_step_ns"] + live["lag_ns"]
        ratios.append(emulated_ns / statistics.median(plain["step_ns"][4:]))
    return [
        Row.at_most("emulated over plain step, median of pairs", statistics.median(ratios), 1.01)
    ]


def measure_memory(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Item 2."""
    rows = []
    for n_ranks in (2, 4):
        arguments = [*SMALL, "--dp-mode", "ddp"]
        real = train_plainly(n_ranks, scratch, arguments, "--steps", "8")[0]
        live = emulate(n_ranks, scratch / str(n_ranks), arguments)["observed"]
        for figure in ("peak_bytes", "reserved_bytes"):
            off = abs(live[figure] - real[figure])
            rows.append(Row.told(f"{n_ranks} ranks: real {figure}", real[figure], "bytes"))
            rows.append(Row.at_most(f"{n_ranks} ranks: {figure}, difference", off, 0, "bytes"))
    return rows


def measure_null(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Item 3."""
    if not options.null_python:
        raise SystemExit("item null: --null-python must name an interpreter with CPU-only torch")
    arguments = [*SMALL, "--dp-mode", "none"]
    real = train_plainly(1, scratch, arguments, "--steps", "4", "--kernels")[0]
    out = scratch / "null.json"
    command = [options.null_python, str(HERE / "gpu_program.py"), str(out), "--steps", "4"]
    command += ["--kernels", "--null", "h100-sxm", "--", SCRIPT, *arguments]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    subprocess.run(command, env=os.environ | alone, check=True)
    null = json.loads(out.read_text())
    names = set(real["operations"]) | set(null["operations"])
    counts = [(real["operations"].get(n, 0), null["operations"].get(n, 0)) for n in names]
    off = abs(null["peak_bytes"] / real["peak_bytes"] - 1)
    return [
        Row.told("real peak", real["peak_bytes"], "bytes"),
        Row.told("null peak", null["peak_bytes"], "bytes"),
        Row.at_most("peak, relative difference", off, 0.005),
        Row.told("real reserved", real["reserved_bytes"], "bytes"),
        Row.told("null reserved", null["reserved_bytes"], "bytes"),
        Row.told("kinds of kernels launched", len(real["kernels"])),
        Row.at_most("operations called differently often", sum(a != b for a, b in counts), 0),
    ]


def measure_release(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """How long after the asked time a stream that was held goes on, by CUDA events."""
    start_cuda()
    words = SharedWords.create(scratch / "words")
    signals, streams = CudaSignals(words), CudaStreams()
    rank_end, coordinator_end = socket.socketpair()
    link = PacerLink.start(scratch / "words", words, Wire(rank_end), 0, 1.0)
    coordinator = Wire(coordinator_end)
    stream, counters, gates = streams.create(), Points(), Points()
    position, rows = 0, []
    for asked_ns in ASKED_NS:
        errors_us = []
        for _ in range(REPEATS):
            position += 1
            at, gate = counters.next(0), gates.next(0)
            arrive = Record(WordKind.ARRIVE, at=at, gate=gate, position=position)
            link.tell(arrive, Record(WordKind.ISSUED, gate=gate))
            began = streams.record(stream)
            signals.count(stream, at)
            signals.hold(stream, gate)
            ended = streams.record(stream)
            arrived = (coordinator.receive(None) or [])[0]
            release = Message(MessageKind.RELEASE, position, arrived.time_ns + asked_ns)
            coordinator.send(release)
            streams.synchronize(ended)
            errors_us.append((streams.elapsed_ns(began, ended) - asked_ns) / 1e3)
        errors_us.sort()
        name = f"asked {asked_ns / 1e3:,.0f} µs"
        rows.append(Row.told(f"{name}: late, median", statistics.median(errors_us), "µs"))
        rows.append(Row.told(f"{name}: late, 90th of 100", errors_us[89], "µs"))
    link.close()
    return rows


if __name__ == "__main__":
    sys.exit(main())
