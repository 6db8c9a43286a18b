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
- ``scale``: 1,000 draws of null torchtitan jobs: 8B at 8,192 and 65,536 ranks, 405B at 512.

PATH keeps the rows of parts that a run leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from null_programs import prepare
from one_truth_gloo import compare
from one_truth_programs import LOOP, PROGRAMS, WORLD, large, user_runs, wide
from prismscale.cluster import Cluster
from prismscale.cost.kernel_measured import KernelTable, MeasuredKernel
from prismscale.validation.rows import Row, finish, read_rows, write_rows
from runs import HERE, Runs, folder_name, is_installed

LIMIT_S = 1200
FREQUENCIES = (1, 2, 3, 10, 100)


def logging_rows(runs: Runs) -> list[Row]:
    """The step at each frequency over the step where every step logs."""
    rows = []
    for program in PROGRAMS:
        if not program.is_installed:
            continue
        step_ns = {}
        for every in FREQUENCIES:
            found = runs.null(
                folder_name(f"log-{program.name}-{every}"),
                program.world_size,
                program.logging(every),
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
        folder = folder_name(f"events-{name}")
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
        folder = folder_name(name)
        found = make(folder)
        if not found:
            rows.append(Row.at_most(f"{name}: forecast against run", float("nan"), 0, "ns"))
            continue
        rows.append(Row.told(f"{name}: step", found["step_ns"] / 1e6, "ms"))
        drawn = forecast(runs, folder)
        off = differs(found, drawn)
        rows.append(Row.at_most(f"{name}: forecast p50 and p95 against run", off, 0, "ns"))
        wider = max(
            (
                abs(at[q] - found["step_ns"])
                for at in drawn.get("width", ())
                for q in ("p50_ns", "p95_ns")
            ),
            default=float("nan"),
        )
        rows.append(Row.at_most(f"{name}: step at larger widths against run", wider, 0, "ns"))
        rows += other_commands(runs, name, folder, found)
        print(*(f"{r.name}: {r.value:g} {r.unit}" for r in rows[-4:]), sep="\n", flush=True)
    return rows + what_if_rows(runs) + import_rows(runs)


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
    """1,000 draws of null torchtitan jobs."""
    if not is_installed("torchtitan"):
        print("left out, torchtitan is not installed: scale")
        return []
    rows = [
        *drawn_rows(runs, "torchtitan 8B, 8,192 ranks", wide(runs, 8192), 120.0),
        *drawn_rows(runs, "torchtitan 8B, 65,536 ranks", wide(runs, 65536), None),
        *drawn_rows(runs, "torchtitan 405B, 512 ranks, interleaved 1F1B", large(runs), 120.0),
    ]
    wide(runs, 512)("scale-512")
    drawn = []
    for option in ("--fuse", "--no-fuse"):
        runs.command("forecast", "scale-512", "--draws", 200, option)
        drawn.append(section(runs, "scale-512", "step")["step_ns"])
    apart = sum(a != b for a, b in zip(*drawn, strict=True))
    rows.append(Row.at_most("512 ranks: draws that differ, fused and not", apart, 0))
    return rows


def drawn_rows(
    runs: Runs, name: str, make: Callable[[str], dict[str, Any]], most_s: float | None
) -> list[Row]:
    """How long 1,000 draws take, and with how much memory."""
    folder = folder_name(name)
    if not make(folder):
        return [Row.at_most(f"{name}: 1,000 draws", float("nan"), most_s or 0, "s")]
    began = time.monotonic()
    done = runs.command("forecast", folder, "--draws", 1000)
    seconds = float("nan") if done.returncode else time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 2**30
    time_row = f"{name}: 1,000 draws"
    return [
        Row.at_most(time_row, seconds, most_s, "s") if most_s else Row.told(time_row, seconds, "s"),
        Row.at_most(f"{name}: largest process so far", peak, 8, "GiB"),
    ]


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
        if is_installed("tokenizers") and not (folder / "tokenizer").exists():
            prepare(folder)
            longer(folder)
        for part in chosen:
            found = PARTS[part](Runs(folder, limit_s=LIMIT_S))
            rows += [replace(row, name=f"{part} | {row.name}") for row in found]
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
