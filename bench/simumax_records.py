"""Megatron-LM beside 24 runs of it on 8 × B200: memory of every rank, and the step.

    python bench/simumax_records.py --simumax DIR [--truth DIR] [--case NAME]… [--json PATH]

The records are SimuMax's: ``torch.cuda.max_memory_allocated`` and ``…_reserved`` of every rank
after three steps of its copies of ``pretrain_gpt.py``, over Megatron-LM 0.14 and Transformer Engine
2.11.0, beside torch 2.10. DIR is a checkout of MooreThreads/SimuMax at 4dcaae5 in which
``simu_tools/megatron_scripts/Megatron-LM`` is Megatron-LM at 23e00ed, as its guide sets it up;
scripts and command lines are its launchers'. The Python of this bench needs transformer-engine
2.11.0 and Apex (both as Python alone) and what Megatron-LM needs: docs/null-device.md; TensorBoard,
too, which the last rank writes to where it is installed.

- *allocated*, *reserved*: the largest error of a record's ranks.
- *step*: predicted against the recorded step; `prismscale validate steps` scores it, and says which
  records were looked at while constants moved.

What is not theirs: torch 2.10. A cuBLAS handle on Blackwell had 8,320 KiB then and has 32 MiB now
(pull request 175344): ``CUBLAS_WORKSPACE_CONFIG`` says what was the default.

Not scored are the layouts of records by which something was found: that workspace; a defect of the
emulation (arguments of tuned Triton kernels were kept); and that it is SimuMax's scripts that were
recorded, which read the loss of every microbatch where Megatron-LM's own read it from the second
step on, so that memory that other streams use is free earlier.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from prismscale.validation.steps.measured import SEEN_SIMUMAX, SIMUMAX
from runs import Runs, median_row, memory_by_rank, provenance

MIB = 2**20
LIMIT_S = 3600
WORLD_SIZE = 8
CLUSTER = "b200"
DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
LOOKED_AT = (
    "llama3_70b_l12_tp4_pp1_dp2_",
    "deepseekv2_tp1_ep8_pp1_dp8_l4_",
    "llama3_405b_l4_tp1_cp8_pp1_dp1_seq32768_",
)
"""Layouts by whose records something was found."""
ALLOCATED_BAR, RESERVED_MEDIAN_BAR, RESERVED_WORST_BAR = 1.0, 3.0, 7.0
NOT_SCORED = ", not scored"
STEP_BARS, RECORDS = Bars(median=6, p90=12), 24
"""Of steps, once all records have one by today's prices."""

DENSE = {
    "llama3-70b": "--hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --vocab-size 128256",
    "llama3-405b": "--hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    "--group-query-attention --num-query-groups 16 --vocab-size 128256",
}
EXPERTS = {
    "deepseekv2": "--hidden-size 5120 --ffn-hidden-size 12288 --vocab-size 102400 "
    "--num-experts 160 --moe-ffn-hidden-size 1536 --moe-router-topk 6 "
    "--moe-shared-expert-intermediate-size 3072",
    "deepseekv3": "--hidden-size 7168 --ffn-hidden-size 18432 --vocab-size 129280 "
    "--num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048",
}
OF_DENSE = """--norm-epsilon 1e-5 --init-method-std 0.008 --save-interval 200000
    --eval-interval 1000
    --disable-tp-comm-bulk-wgrad --disable-tp-comm-bulk-dgrad --disable-tp-comm-overlap-rs
    --disable-tp-comm-overlap-ag --disable-tp-comm-split-ag --disable-tp-comm-split-rs"""
OF_EXPERTS = """--norm-epsilon 1e-6 --init-method-std 0.006 --save-interval 100000 --eval-interval 1
    --num-attention-heads 128 --multi-latent-attention --enable-experimental --qk-layernorm
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --rotary-scaling-factor 1
    --moe-token-dispatcher-type alltoall --moe-router-score-function softmax
    --moe-router-group-topk 3 --moe-router-load-balancing-type seq_aux_loss
    --moe-router-pre-softmax --moe-router-topk-scaling-factor 16 --moe-aux-loss-coeff 3e-3
    --moe-expert-capacity-factor 1 --moe-grouped-gemm --moe-permute-fusion
    --moe-pad-expert-input-to-capacity"""
OF_ALL = """--attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear
    --position-embedding-type rope --no-position-embedding --swiglu --normalization RMSNorm
    --untie-embeddings-and-output-weights --seed 42 --micro-batch-size 1 --use-mcore-models
    --no-bias-dropout-fusion --use-distributed-optimizer --use-flash-attn --sequence-parallel
    --recompute-granularity full --recompute-method block --recompute-num-layers 0
    --distributed-backend nccl --mock-data --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0 --initial-loss-scale 65536 --min-loss-scale 1.0 --train-iters 10
    --lr-warmup-iters 5 --lr 2.4e-4 --lr-decay-style cosine --min-lr 1e-6 --bf16
    --attention-softmax-in-fp32 --no-masked-softmax-fusion --accumulate-allreduce-grads-in-fp32
    --tokenizer-type NullTokenizer --split 1 --no-create-attention-mask-in-dataloader
    --log-interval 1 --log-throughput --eval-iters 0 --transformer-impl transformer_engine"""
FUSED_LOSS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
"""Records whose name ends in ``cef``; Transformer Engine's, which SimuMax's guide sets up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One recorded run."""

    name: str
    script: str
    options: tuple[str, ...]
    peaks: Mapping[int, tuple[float, float]]
    """MiB allocated and reserved, by rank."""
    step_ms: float

    @property
    def layout(self) -> str:
        """The name without the number of microbatches."""
        return self.name.partition("mbc")[0]

    @property
    def is_scored(self) -> bool:
        """Whether nothing was found by it."""
        return not self.layout.startswith(LOOKED_AT)


def load_records(path: Path) -> list[Record]:
    """The runs in ``megatron_steps.json``."""
    return [_record(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def _record(row: Mapping[str, Any]) -> Record:
    peaks = {
        int(rank): (peak["max_allocated_mb"], peak["max_reserved_mb"])
        for rank, peak in row["peak_memory_by_rank_mb"].items()
    }
    return Record(
        name=row["case"],
        script="pretrain_gpt.py" if row["model"] in DENSE else "pretrain_deepseekv2.py",
        options=tuple(_options(row)),
        peaks=peaks,
        step_ms=row["real_ms"],
    )


def _options(row: Mapping[str, Any]) -> Iterator[str]:
    """The command line, as the launchers make it."""
    size = {key: int(n) for key, n in re.findall(r"(tp|cp|ep|pp|seq)(\d+)", row["case"])}
    tensor, context, stages = size["tp"], size.get("cp", 1), size["pp"]
    replicas = WORLD_SIZE // (tensor * context * stages)
    length = size.get("seq", 4096)
    yield from OF_ALL.split()
    yield from f"--num-layers {row['layer_num']} --seq-length {length}".split()
    yield from f"--max-position-embeddings {length}".split()
    yield from f"--global-batch-size {row['mbc'] * replicas}".split()
    yield from f"--tensor-model-parallel-size {tensor}".split()
    yield from f"--pipeline-model-parallel-size {stages}".split()
    if context > 1:
        yield from f"--context-parallel-size {context} --cp-comm-type a2a".split()
    if row["case"].endswith("cef"):
        yield from FUSED_LOSS.split()
    if row["model"] in DENSE:
        yield from DENSE[row["model"]].split() + OF_DENSE.split()
        return
    yield from EXPERTS[row["model"]].split() + OF_EXPERTS.split()
    yield from f"--moe-router-num-groups {size['ep']}".split()
    yield from f"--expert-model-parallel-size {size['ep']}".split()
    yield from ("--moe-layer-freq", f"([0]*1+[1]*{row['layer_num'] - 1})*1")


def measure(record: Record, script: Path, runs: Runs) -> list[Row]:
    """Run one record's command line."""
    job = ("--device", "null", "--cluster", CLUSTER, "--world-size", WORLD_SIZE)
    board = ("--tensorboard-dir", runs.folder / "tensorboard")
    found = runs.run(record.name, (*job, "--watch-steps", 1), (script, *record.options, *board))
    if not found:
        return [Row.at_least(f"{record.name}: completes", 0, 1)]
    memory = memory_by_rank(runs.folder / record.name, found["captured"])
    ours = {r: (m.peak_bytes / MIB, (m.reserved_bytes or 0) / MIB) for r, m in memory.items()}
    allocated, reserved = (
        max((_percent(ours[r][i], its[i]) for r, its in record.peaks.items()), key=abs)
        for i in range(2)
    )
    step_ms = found["step_ns"] / 1e6
    mark = NOT_SCORED if record.name in SEEN_SIMUMAX else ""
    name = f"{record.name}: step {step_ms:.2f} of {record.step_ms:.1f} ms{mark}"
    step = Row.told(name, _percent(step_ms, record.step_ms), "%")
    return [
        _row(record, "allocated", allocated, ALLOCATED_BAR),
        _row(record, "reserved", reserved, RESERVED_WORST_BAR),
        replace(step, note=provenance(found, SIMUMAX, CLUSTER)),
        *median_row(record.name, found),
    ]


def _row(record: Record, what: str, error: float, bar: float) -> Row:
    if not record.is_scored:
        return Row.told(f"{record.name}: {what}{NOT_SCORED}", error, "%")
    return Row.at_most(f"{record.name}: {what}", abs(error), bar, "%")


def _percent(ours: float, its: float) -> float:
    return 100 * (ours / its - 1)


def main() -> int:
    """Run the records, print the table, and write it where asked; returns the exit code."""
    options = _arguments()
    path = options.truth / "simumax_b200" / "megatron_steps.json"
    if not path.is_file():
        print(f"no public truth at {path}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    records = load_records(path)
    chosen = [r for r in records if any(part in r.name for part in options.case or [""])]
    names = {r.name for r in records}
    rows = [row for row in read_rows(options.json) if row.subject in names]
    scripts = options.simumax.absolute() / "simu_tools" / "megatron_scripts"
    paths = [str(scripts / "Megatron-LM"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(folder, limit_s=LIMIT_S, environment=environment)
        for record in chosen:
            found = measure(record, scripts / record.script, runs)
            print(*(f"{r.name}: {r.value:.3g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if options.json:
                write_rows(rows, options.json)
    rows += _overall(rows)
    return finish(rows, title="Megatron-LM on 8 × B200", json_path=options.json)


def _overall(rows: Sequence[Row]) -> list[Row]:
    """The median over scored records, and errors of scored steps."""
    scored = [row.value for row in rows if row.name.endswith(": reserved")]
    steps = [row for row in rows if ": step " in row.name]
    errors = [row.value for row in steps if NOT_SCORED not in row.name]
    name = f"{len(scored)} records scored: reserved, median"
    memory = [Row.at_most(name, median(scored), RESERVED_MEDIAN_BAR, "%")] if scored else []
    bars = STEP_BARS if len(steps) == RECORDS else Bars()
    return [*memory, *error_rows("step", errors, bars, of="records")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--simumax", type=Path, required=True, help="checkout of SimuMax")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", action="append", help="part of a record's name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
