"""Memory on the null device: against records from 8 x H100, a published distribution, and the CPU.

    python bench/null_memory.py [--truth DIR] [--only NAME] [--json PATH]

Needs megatron-core 0.16.1 for the first two, transformer-engine 2.9.0 and flash-attn 2.7.4 (their
Python code: docs/null-device.md) for most cases of the first.

- Each case of ``DIR/megatron_golden`` that the example can run (``megatron_records.py``) is run by
  ``examples/megatron/train.py`` as its last rank, the one whose memory was recorded, for three
  steps on a null H100. Records hold the peak of every step; fp16 runs skip their first steps (the
  loss scale overflows), so the first step's peak and the steady one, before the run was resumed at
  step 51, are both compared, and the larger error is the row's. The records are of Megatron-LM's
  development branch in a container with Transformer Engine, Apex and FlashAttention. Prismscale's
  stand-ins for these were written from their sources; nothing in them is fitted to the records.
  The branch is newer than the packages; 2.9.0 is the last Transformer Engine that has all that
  megatron-core 0.16.1 imports.
- MLPerf's Llama 3.1 405B on H100 (TP 8, PP 8, VP 8): its recorded peaks follow
  50.373 + 67.550 / (DP x CP) GiB. The slope is the sharded optimizer of rank 0, and is what the
  example must reproduce; the constant depends on fp8, on the attention kernel and on CP.
- ``examples/llama`` on the null device and on the CPU (``null_against_cpu.py``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron_records import Case, load_cases
from null_against_cpu import against_cpu_rows
from prismscale.validation.rows import Row, finish

RANK_PROGRAM = Path(__file__).with_name("null_rank.py")
DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
BAR_PERCENT = 0.5
WORLD_SIZE = 8
CURVE, CPU = "curve", "cpu"
CURVE_GIB = 67.550
CURVE_BAR_PERCENT = 1.0
CURVE_WIDTHS = (2, 4, 8)
CURVE_MODEL_PARALLEL = 64
LLAMA_405B = """--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
    --num-attention-heads 128 --group-query-attention --num-query-groups 8 --seq-length 8192
    --vocab-size 32000 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split --micro-batch-size 1 --train-iters 2"""


def main() -> int:
    """Print the table; exit code 1 where a bar is missed, 2 where there is no truth."""
    options = _options()
    folder = options.truth / "megatron_golden" / "cases"
    if not folder.is_dir():
        print(f"no public truth at {folder}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    cases = [case for case in load_cases(folder) if options.only in (None, case.name)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = list(pool.map(_record_row, cases))
    if options.only in (None, CURVE):
        rows.append(_curve_row())
    if options.only in (None, CPU):
        with tempfile.TemporaryDirectory() as scratch:
            rows += against_cpu_rows(Path(scratch))
    return finish(rows, title="Memory on the null device", json_path=options.json)


def _record_row(case: Case) -> Row:
    """The larger error of the first step's peak and the steady one."""
    peaks = _peaks(
        case.options,
        WORLD_SIZE - 1,
        WORLD_SIZE,
        environment=case.environment,
    )
    if not peaks:
        return Row.at_most(f"{case.name}: ran", float("nan"), 0.0)
    recorded = (case.first_peak_bytes, case.steady_peak_bytes)
    ours = (peaks[0], peaks[-1])
    error = max(100 * abs(mine / its - 1) for mine, its in zip(ours, recorded, strict=True))
    told = " and ".join(f"{mine:,} of {its:,}" for mine, its in zip(ours, recorded, strict=True))
    return Row.at_most(f"{case.name}: peaks {told} bytes", error, BAR_PERCENT, "%")


def _curve_row() -> Row:
    """Least squares of the steady peak over 1 / DP."""
    peaks = []
    for width in CURVE_WIDTHS:
        options = [*LLAMA_405B.split(), "--global-batch-size", str(8 * width)]
        world_size = CURVE_MODEL_PARALLEL * width
        # More memory than any GPU: unfused attention over 8,192 tokens keeps its scores.
        found = _peaks(options, 0, world_size, memory_gib=4096)
        peaks.append(found[-1] / 2**30 if found else float("nan"))
    slope = float(np.polyfit(1 / np.array(CURVE_WIDTHS), peaks, 1)[0])
    name = f"MLPerf Llama 3.1 405B: slope {slope:.3f} against {CURVE_GIB} GiB x DP x CP"
    return Row.at_most(name, 100 * abs(slope / CURVE_GIB - 1), CURVE_BAR_PERCENT, "%")


def _peaks(
    options: Sequence[str],
    rank: int,
    world_size: int,
    *,
    memory_gib: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[int]:
    """Peak bytes after each step of one rank, run in a process of its own; empty if it failed."""
    job = ["--rank", str(rank), "--world-size", str(world_size), "--memory-gib", str(memory_gib)]
    done = subprocess.run(
        [sys.executable, str(RANK_PROGRAM), *job, "--", *options],
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("peaks ")]
    if done.returncode or not found:
        print(*done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return []
    return [int(word) for word in found[-1].split()[1:]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--only", default=None, help=f"A case, `{CURVE}` or `{CPU}`.")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
