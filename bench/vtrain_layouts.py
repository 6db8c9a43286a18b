"""Megatron-LM's layouts on 8 to 512 A100s beside vTrain's published iterations, and the choice.

    python bench/vtrain_layouts.py [--truth DIR] [--case NAME]… [--json PATH]

A seeded sample of ``vtrain_a100`` goes through ``prismscale run --device null``: rows that share
GPUs, model and global batch, so that the layout with the shortest predicted step can be held
against the best that was published. The Python of this bench needs megatron-core 0.16.1, Triton,
Transformer Engine 2.9.0 and, on ``PYTHONPATH``, Apex, both as Python alone: docs/null-device.md.
The program is ``examples/megatron``. A row takes 2 to 17 minutes on one core; what ``PATH`` holds
of other rows stays, so the sample may be run in pieces; bars are on the whole of it alone.

Published are GPUs, layout, batch sizes, width, heads, layers and length. From the code and the
validation settings that the authors published (VIA-Research/vTrain) are: fp16, learned positions, a
vocabulary of 50,257, Apex's norms, a fused softmax, 1F1B without interleaving, one all-reduce of
16-bit gradients behind the last backward pass (``use_gradient_bucket`` false), and 800 Gb/s of
network a node: ``nics_per_node`` is 4 here, where the preset ``a100-80g`` has 8 cards. Assumed:

- Adam without sharding, loss scaling, clipped gradients and dropout of 0.1, Megatron's defaults;
- weight gradients added by the product itself (Apex), elementwise work fused: by inductor here, by
  TorchScript then;
- ranks in Megatron's order (tensor, data, pipeline), tensor parallelism without sequence
  parallelism, all collectives by the preset's rules;
- several nodes recompute every layer in full, one node nothing. The settings switch it on in both,
  but with it rows of one node would have run products at 94 % of the peak, by their slope over
  layers and microbatches. Rows of that reckoning (``is_looked_at``) are not in the sample.

Not scored, and marked: rows of one node without tensor parallelism whose microbatch is narrow. The
host's time for an operator rested on them until it was fitted on H100 rows.

*After 5 rows*: what ``prismscale calibrate steps`` makes of five rows, a seeded one of at most
eight microbatches of each group but the largest model's; these are not scored then. The other runs
are timed again by ``prismscale forecast --cluster`` with the file that it writes: of all rows whose
runs are kept (``--keep``), at the end of a call. One factor for all, the median of published over
predicted of the five, stands beside it without a bar. No constant of the product was moved for, or
by, rows that are scored.

Split rows of one node are the host's: by the published slopes a layer and microbatch of a narrow
row takes 2.75 to 4.99 ms, in no order of its work. 2,048 wide over eight GPUs it takes 4.79 ms for
one sequence and 3.87 ms for two; on two GPUs 4.63 ms for two sequences, and 4.76 ms on one. That is
the host. Its time for an operator was 30 µs; 68 would meet the median of the six rows that are not
scored. Megatron-LM's own tests on H100s (``megatron_golden_steps.py``) gave 61, which holds here,
too. A call that keeps the runs prints what the host's time would have to be over the model's.

Several nodes have wide microbatches, and products decide. There rows with PP 8 and eight
microbatches ran at 190 (6,144 wide, TP 1), 179 (6,144 wide, TP 2) and 161 TFLOP/s a GPU (8,192
wide, TP 2), by FLOPs with recomputation and 15 slots of 1F1B; ours at 165, 160 and 172: the wider
products are the slower ones there, and the faster ones here. A published row that stands alone
(TP 8, microbatch 64: 9,839 ms, where 32 take 4,972) is scored like any other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import median

import numpy as np

from host_needed import host_needed as factor
from prismscale.cluster import Cluster
from prismscale.forecast.step_spread import DRAWS
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from prismscale.validation.steps.measured import VTRAIN
from prismscale.validation.steps.vtrain_rows import (
    PRESET,
    VOCABULARY,
    Iteration,
    Model,
    cluster_of,
    group_name,
    load_iterations,
)
from runs import EXAMPLES, Runs, median_row, provenance

DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
SCRIPT = EXAMPLES / "megatron" / "train.py"
LIMIT_S = 3600
SEED = 24
CLUSTER_FILE = "a100-800gbps.toml"
CALIBRATION_ROWS, MOST_MICROBATCHES = 5, 8
"""Of how many rows a user has the step, and how long their programs are at most."""
UNCALIBRATED, CALIBRATED, CHOICE_BAR = Bars(median=8), Bars(median=5), 3.0
STEP = ": step "
CALIBRATED_STEP = ": calibrated step "
FACTORS = "factors of the rows that are given"
CALIBRATED_FILE = "calibrated.toml"
HOST_NEEDED = "host's time over the model's that gives the steps not scored"

ONE_NODE: tuple[Model, ...] = ((8, 32, 2048, 24), (8, 32, 1024, 24))
DRAWN_ON_ONE_NODE, DRAWN_ON_SEVERAL = 8, 6


def options_of(row: Iteration) -> str:
    """Of the program."""
    recomputed = "none" if row.is_one_node else "full"
    return f"""--fp16 --num-layers {row.layers} --hidden-size {row.hidden}
        --num-attention-heads {row.heads} --seq-length {row.length}
        --micro-batch-size {row.micro_batch} --global-batch-size {row.batch}
        --tensor-model-parallel-size {row.tensor} --pipeline-model-parallel-size {row.stages}
        --vocab-size {VOCABULARY} --recompute-granularity {recomputed}"""


def sample(every: Sequence[Iteration]) -> list[Iteration]:
    """Seeded, by group; on one node in turn of each family, so that each has its share."""
    generator = random.Random(SEED)
    models = dict.fromkeys([*ONE_NODE, *(row.model for row in every if not row.is_one_node)])
    drawn: list[Iteration] = []
    for model in models:
        rows = [row for row in every if row.model == model and not row.is_looked_at]
        generator.shuffle(rows)
        by_family: dict[str, list[Iteration]] = {}
        for row in rows:
            by_family.setdefault(row.family, []).append(row)
        turns = (row for turn in zip_longest(*by_family.values()) for row in turn if row)
        limit = DRAWN_ON_ONE_NODE if model in ONE_NODE else DRAWN_ON_SEVERAL
        drawn += [row for _, row in zip(range(limit), turns, strict=False)]
    return drawn


def calibration(drawn: Sequence[Iteration]) -> list[Iteration]:
    """The rows whose measured steps a user is supposed to have: one of each of the first groups."""
    generator = random.Random(SEED)
    models = list(dict.fromkeys(row.model for row in drawn))[:CALIBRATION_ROWS]
    short = [row for row in drawn if row.is_scored and row.microbatches <= MOST_MICROBATCHES]
    return [generator.choice([row for row in short if row.model == model]) for model in models]


def measure(row: Iteration, cluster: Path, runs: Runs) -> list[Row]:
    """Run one row's program."""
    job = ("--device", "null", "--cluster", cluster, "--world-size", row.gpus)
    brief = ("--samples", 1, "--watch-steps", 0)
    found = runs.run(folder_of(row), (*job, *brief), (SCRIPT, *options_of(row).split()))
    if not found:
        return [Row.at_least(f"{row.name}: completes", 0, 1)]
    step_ms = found["step_ns"] / 1e6
    mark = "" if row.is_scored else ", not scored"
    name = f"{row.name}{STEP}{step_ms:,.1f} of {row.time_ms:,.1f} ms{mark}"
    step = Row.told(name, 100 * (step_ms / row.time_ms - 1), "%")
    note = provenance(found, VTRAIN, PRESET)
    return [replace(step, note=note), *median_row(row.name, found)]


def folder_of(row: Iteration) -> str:
    """In which its run lies."""
    return f"{'-'.join(map(str, row.model))}-{row.tensor}-{row.stages}-{row.micro_batch}"


def calibrated(drawn: Sequence[Iteration], runs: Runs) -> Iterator[Row]:
    """The kept runs' median steps after calibration by five of them; none where one is missing."""
    kept = [row for row in drawn if (runs.folder / folder_of(row) / "results.json").exists()]
    given = calibration(drawn)
    if not all(row in kept for row in given):
        return
    measured = [f"{folder_of(row)}={row.time_ms}ms" for row in given]
    done = runs.command("calibrate", "steps", *measured, "--out", CALIBRATED_FILE)
    print(done.stdout, done.stderr[-3000:], sep="\n", flush=True)
    if done.returncode:
        return
    factors = Cluster.load(runs.folder / CALIBRATED_FILE).device.calibration
    if factors is not None:
        yield Row.told(f"{FACTORS}: time of kernels over the model's", factors.kernels)
        host = Row.told(f"{FACTORS}: host's time over the model's", factors.host)
        yield replace(host, note=f"±{100 * factors.host_error:.0f} %")
    for row in kept:
        yield from _calibrated_step(row, runs, is_given=row in given)


def _calibrated_step(row: Iteration, runs: Runs, *, is_given: bool) -> Iterator[Row]:
    folder = folder_of(row)
    brief = ("--draws", DRAWS, "--no-shares")
    told = runs.command("forecast", folder, "--cluster", CALIBRATED_FILE, *brief)
    if told.returncode:
        print(told.stderr[-3000:], file=sys.stderr)
        return
    results = json.loads((runs.folder / folder / "results.json").read_text())
    step_ms = results["forecast"]["step"]["quantiles_ns"]["0.5"]["value"] / 1e6
    mark = ", given" if is_given else "" if row.is_scored else ", not scored"
    name = f"{row.name}{CALIBRATED_STEP}{step_ms:,.1f} of {row.time_ms:,.1f} ms{mark}"
    yield Row.told(name, 100 * (step_ms / row.time_ms - 1), "%")


def host_needed(drawn: Sequence[Iteration], runs: Runs) -> Iterator[Row]:
    """What the host's time is off by in rows that are not scored: where the host's error is from.
    A row that the model does not find too short needs no more than the model's."""
    kept = {row: runs.folder / folder_of(row) for row in drawn if not row.is_scored}
    if not all((folder / "results.json").exists() for folder in kept.values()):
        return
    needed = [max(1.0, factor(folder, row.time_ms)) for row, folder in kept.items()]
    yield Row.told(f"{HOST_NEEDED}: median of {len(needed)}", median(needed))
    yield Row.told(f"{HOST_NEEDED}: p90 of {len(needed)}", float(np.quantile(needed, 0.9)))


def overall(rows: Sequence[Row], drawn: Sequence[Iteration]) -> Iterator[Row]:
    """Errors by family and of all, the same after calibration, and choices of layout."""
    error = _errors(rows, STEP)
    run = [one for one in drawn if one.name in error]
    scored = [one for one in run if one.is_scored]
    for family in dict.fromkeys(one.family for one in run):
        yield from error_rows(family, [error[o.name] for o in scored if o.family == family])
    seen = [error[one.name] for one in run if not one.is_scored]
    yield from error_rows("not scored, host's time seen in such rows", seen)
    is_whole = len(run) == len(drawn)
    yield Row.at_least("rows of the sample that were run", len(run), len(drawn))
    before = [error[one.name] for one in scored]
    yield from error_rows("uncalibrated", before, UNCALIBRATED if is_whole else Bars())
    given = calibration(drawn)
    if all(one.name in error for one in given):
        factor = median(1 / (1 + error[one.name] / 100) for one in given)
        yield Row.told(f"factor of {len(given)} rows", factor)
        held_out = [one for one in scored if one not in given]
        after = [100 * (factor * (1 + error[one.name] / 100) - 1) for one in held_out]
        yield from error_rows(f"after {len(given)} rows, one factor", after)
        yield from _calibrated_rows(rows, held_out, len(given), is_whole=is_whole)
    for model in dict.fromkeys(one.model for one in drawn):
        yield from _choice([one for one in drawn if one.model == model], error)


def _errors(rows: Sequence[Row], kind: str) -> dict[str, float]:
    """Of the steps of a kind, by the row that they are of."""
    return {row.name.partition(kind)[0]: row.value for row in rows if kind in row.name}


def _is_calibrated(row: Row) -> bool:
    return row.subject == FACTORS or CALIBRATED_STEP in row.name


def _calibrated_rows(
    rows: Sequence[Row], held_out: Sequence[Iteration], given: int, *, is_whole: bool
) -> Iterator[Row]:
    """Errors of the calibrated steps of rows that were not given."""
    after = _errors(rows, CALIBRATED_STEP)
    found = [one for one in held_out if one.name in after]
    for family in dict.fromkeys(one.family for one in found):
        errors = [after[o.name] for o in found if o.family == family]
        yield from error_rows(f"{family}, after {given} rows", errors)
    is_whole = is_whole and len(found) == len(held_out)
    errors = [after[one.name] for one in found]
    yield from error_rows(f"after {given} rows", errors, CALIBRATED if is_whole else Bars())


def _choice(drawn: Sequence[Iteration], error: Mapping[str, float]) -> Iterator[Row]:
    """What the layout of the shortest predicted step loses to the best, by published figures."""
    group = [one for one in drawn if one.name in error]
    if len(group) < 2:
        return
    chosen = min(group, key=lambda one: one.time_ms * (1 + error[one.name] / 100))
    lost = 100 * (chosen.time_ms / min(one.time_ms for one in group) - 1)
    name = f"{group_name(group[0].model)}: chosen of {len(group)} layouts, slower than the best"
    is_whole = len(group) == len(drawn)
    yield Row.at_most(name, lost, CHOICE_BAR, "%") if is_whole else Row.told(name, lost, "%")


def main() -> int:
    """Run the sample, print the table, and write it where asked; returns the exit code."""
    options = _arguments()
    folder = options.truth / "vtrain_a100"
    if not folder.is_dir():
        print(f"no public truth at {folder}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    drawn = sample(load_iterations(folder))
    chosen = [one for one in drawn if any(part in one.name for part in options.case or [""])]
    subjects = {FACTORS, HOST_NEEDED, *(one.name for one in drawn)}
    rows = [row for row in read_rows(options.json) if row.subject in subjects]
    with tempfile.TemporaryDirectory() as scratch:
        kept = (options.keep or Path(scratch)).absolute()
        kept.mkdir(parents=True, exist_ok=True)
        cluster = kept / CLUSTER_FILE
        cluster.write_text(cluster_of().to_toml())
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        runs = Runs(kept, limit_s=LIMIT_S, environment=environment)
        for one in chosen:
            found = measure(one, cluster, runs)
            print(*(f"{r.name}: {r.value:.3g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if options.json:
                write_rows([*rows, *overall(rows, drawn)], options.json)
        rows = renewed(rows, list(host_needed(drawn, runs)))
        if found := list(calibrated(drawn, runs)):
            rows = [row for row in rows if not _is_calibrated(row)] + found
    rows += overall(rows, drawn)
    return finish(rows, title="vTrain's layouts on A100s", json_path=options.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", action="append", help="part of a row's name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
