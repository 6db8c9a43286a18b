"""Steps of MLPerf's GPT-3 and Llama-3.1 405B on H100, by Megatron-LM on null devices.

    python bench/mlperf_steps.py --megatron DIR --truth DIR [--case NAME]… [--json PATH]

DIR is a checkout of Megatron-LM core_v0.16.1 with its helpers compiled. The Python of this bench
has Transformer Engine 2.9.0 and Apex as Python alone, and what Megatron-LM imports
(docs/null-device.md). The trainer of the records is NeMo, over the same library. What their logs
state is taken from them: ranks, batch, TP, PP, VP, CP, microbatch. Sizes of the models are public.
The rest is what NVIDIA's configurations for these submissions say: FP8 with delayed scaling and
parameters in 8 bits, sequence parallelism, products that overlap with communication, the
distributed optimizer with both overlaps, gradients reduced in bf16, no dropout. Logs of round 3.1
state no VP: it is taken to be that of round 4.1.

- *step*: predicted, without variation, and the median over runs of a log's median step, wall time.
- *p50*: the step that the run shows, of draws with the cluster's variation; held against the same.
- *from N GPUs*: the step on N GPUs as measured, times by how much the predicted ones differ.

Ranks are captured with ``--quick``.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from runs import MEDIAN_STEP, Runs, folder_name, median_row, our_commit

LIMIT_S = 7_200
STEADY, MEASURED = "step, predicted", "step, measured"
KINDS = (("p50", MEDIAN_STEP), ("without variation", STEADY))
"""Kinds of predicted steps, and how their rows end."""
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
UNCALIBRATED_BAR = 12.0
SCALE_OUT_MEDIAN_BAR, SCALE_OUT_WORST_BAR = 1.0, 3.0

SHARED = """--use-mcore-models --bf16 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --grad-reduce-in-bf16 --sequence-parallel --tp-comm-overlap
    --transformer-impl transformer_engine --attention-backend fused --fp8-format hybrid
    --fp8-amax-history-len 32 --fp8-amax-compute-algo max --fp8-param-gather
    --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine
    --train-iters 50 --lr-warmup-iters 10 --cross-entropy-loss-fusion --manual-gc --mock-data
    --tokenizer-type NullTokenizer --split 99,1,0 --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100
    --save-interval 1000 --ckpt-format torch_dist --pipeline-model-parallel-size 8"""
GPT3 = """--num-layers 96 --hidden-size 12288 --ffn-hidden-size 49152 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51199 --init-method-std 0.006
    --apply-layernorm-1p --position-embedding-type learned_absolute
    --tensor-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"""
LLAMA = """--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
    --max-position-embeddings 8192 --vocab-size 31999 --init-method-std 0.02 --normalization RMSNorm
    --position-embedding-type rope --rotary-base 500000 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --tensor-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8 --context-parallel-size 2
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One configuration of a submission."""

    bench: str
    round: str
    gpus: int
    batch: int
    microbatch: int
    model: str

    @property
    def name(self) -> str:
        """For rows."""
        model = {"gpt3": "GPT-3", "llama31_405b": "405B"}[self.bench]
        return f"{model}, round {self.round}, {self.gpus:,} H100"

    @property
    def options(self) -> list[str]:
        """Of ``pretrain_gpt.py``."""
        sizes = f"--micro-batch-size {self.microbatch} --global-batch-size {self.batch}"
        return f"{SHARED} {self.model} {sizes}".split()


def gpt3(round_: str, gpus: int, batch: int, microbatch: int) -> Job:
    """TP 4, PP 8, VP 6."""
    return Job(
        bench="gpt3", round=round_, gpus=gpus, batch=batch, microbatch=microbatch, model=GPT3
    )


def llama_405b(gpus: int) -> Job:
    """TP 8, PP 8, VP 8, CP 2."""
    return Job(bench="llama31_405b", round="5.0", gpus=gpus, batch=1152, microbatch=1, model=LLAMA)


FAMILIES = (
    (
        gpt3("3.1", 512, 2048, 1),
        gpt3("3.1", 768, 3072, 1),
        gpt3("3.1", 4096, 2048, 1),
        gpt3("3.1", 6144, 3072, 1),
        gpt3("3.1", 8192, 4096, 1),
    ),
    (gpt3("4.1", 512, 2048, 2), gpt3("4.1", 256, 2048, 2)),
    (llama_405b(512), llama_405b(2048)),
)
"""Jobs that differ in ranks and microbatches alone; the first is what others are told from."""


def measured_s(job: Job, truth: Path) -> float:
    """The median over runs of the wall time from step to step."""
    with (truth / "mlperf" / "mlperf_llm_runs.csv").open(newline="", encoding="utf-8") as text:
        found = [
            float(row["wall_delta_median_s"])
            for row in csv.DictReader(text)
            if (row["bench"], row["round"]) == (job.bench, job.round)
            and row["submitter"] == "NVIDIA"
            and "H100" in row["accelerator"]
            and (int(row["n_gpus"]), int(row["global_batch"])) == (job.gpus, job.batch)
        ]
    return median(found)


def measure(job: Job, truth: Path, script: Path, runs: Runs) -> list[Row]:
    """Predict one step through the command line."""
    files = ("--data-cache-path", runs.folder / "data")
    found = runs.run(
        folder_name(job.name),
        ("--device", "null", "--cluster", "h100-sxm", "--world-size", job.gpus, "--quick"),
        (script, *job.options, *files),
    )
    note = f"prismscale {our_commit()}"
    if not found:
        missed = Row.at_least(f"{job.name}: completes", 0, 1)
        return [replace(missed, note=f"{note}; {runs.reason}")]
    predicted, real = found["step_ns"] / 1e6, 1e3 * measured_s(job, truth)
    off = 100 * (predicted / real - 1)
    rows = (
        Row.told(f"{job.name}: {STEADY}", predicted, "ms"),
        Row.told(f"{job.name}: {MEASURED}", real, "ms"),
        Row.told(f"{job.name}: step, off by", off, "%"),
    )
    return [replace(row, note=note) for row in (*rows, *median_row(job.name, found))]


def scores(rows: Sequence[Row]) -> Iterator[Row]:
    """All jobs together, and each from the first of its family, by either kind of step."""
    known = {row.name: row.value for row in rows}
    for kind, what in KINDS:
        yield from _scores(known, kind, what)


def _scores(known: Mapping[str, float], kind: str, what: str) -> Iterator[Row]:
    """By the rows that end with ``what``, for people ``kind``."""
    jobs = [job for family in FAMILIES for job in family if f"{job.name}: {what}" in known]
    off = [abs(known[f"{j.name}: {what}"] / known[f"{j.name}: {MEASURED}"] - 1) for j in jobs]
    if off:
        name = f"uncalibrated steps, {kind} ({len(off)}): median error"
        yield Row.at_most(name, 100 * median(off), UNCALIBRATED_BAR, "%")
    scaled = []
    for first, *others in FAMILIES:
        for job in others:
            if job in jobs and first in jobs:
                told_0, real_0, told, real = (
                    known[f"{j.name}: {w}"] for j in (first, job) for w in (what, MEASURED)
                )
                scaled.append(100 * (told * real_0 / told_0 / real - 1))
                name = f"{job.name}: step from {first.gpus:,} GPUs, {kind}, off by"
                yield Row.told(name, scaled[-1], "%")
    if scaled:
        sizes = [abs(value) for value in scaled]
        name = f"steps from another scale, {kind} ({len(sizes)})"
        yield Row.at_most(f"{name}: median error", median(sizes), SCALE_OUT_MEDIAN_BAR, "%")
        yield Row.at_most(f"{name}: largest error", max(sizes), SCALE_OUT_WORST_BAR, "%")


def main() -> int:
    """Run the jobs, print the table, and write it where asked; returns the exit code."""
    options = _arguments()
    jobs = [job for family in FAMILIES for job in family]
    chosen = [job for job in jobs if any(part in job.name for part in options.case or [""])]
    names = {job.name for job in jobs}
    rows = [
        row for row in read_rows(options.json) if row.subject in names and "from" not in row.name
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(folder, limit_s=LIMIT_S, environment=ENVIRONMENT)
        script = options.megatron.absolute() / "pretrain_gpt.py"
        for job in chosen:
            found = measure(job, options.truth, script, runs)
            print(*(f"{r.name}: {r.value:.5g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if options.json:
                write_rows([*rows, *scores(rows)], options.json)
    return finish([*rows, *scores(rows)], title="MLPerf's steps", json_path=options.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--truth", type=Path, required=True, help="folder of public measurements")
    parser.add_argument("--case", action="append", help="part of a row's name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
