"""Peak memory of Megatron on the null device against Megatron-LM's own records from 8 x H100.

    python bench/null_golden.py [--truth DIR] [--case NAME] [--json PATH]

Needs megatron-core 0.16.1. Each case of ``DIR/megatron_golden`` that runs megatron-core's own
layers (``--transformer-impl local``) on a GPT is run by ``examples/megatron/train.py`` as its last
rank, the one whose memory was recorded, for three steps on a null H100. Records hold the peak of
every step; fp16 runs skip their first steps (the loss scale overflows), so the first step is
compared by itself and the steady peak with the peak before the run was resumed at step 51.

The records are of Megatron-LM's development branch in a container with Apex, so its kernels get
stand-ins (``apex_kernels.py``), and its code is newer than the package's.

The other rows are MLPerf's Llama 3.1 405B on H100 (TP 8, PP 8, VP 8): its recorded peaks follow
50.373 + 67.550 / (DP x CP) GiB. The slope is the sharded optimizer of rank 0, and is what the
example must reproduce; the constant depends on fp8, on the attention kernel and on CP.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prismscale.analysis.rows import Row, print_rows, write_rows

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TRUTH = ROOT / ".." / "shared" / "truth"
BAR_PERCENT = 0.5
WORLD_SIZE = 8
LAW_GIB = 67.550
LAW_BAR_PERCENT = 1.0
LAW_WIDTHS = (2, 4, 8)
LAW_MODEL_PARALLEL = 64
LLAMA_405B = """--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
    --num-attention-heads 128 --group-query-attention --num-query-groups 8 --seq-length 8192
    --vocab-size 32000 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split --micro-batch-size 1 --train-iters 2"""
STEPS = 3
RESUMED_AT = 51
# Data, logs, checkpoints, and what only the newer code has: no part of the memory of a step.
IGNORED = (
    "log-",
    "tensorboard-",
    "data-",
    "ckpt-",
    "dist-ckpt-",
    "save",
    "load",
    "eval-",
    "lr-",
    "min-lr",
    "vocab-file",
    "merge-file",
    "split",
    "train-iters",
    "timing-",
    "async-save",
    "use-persistent-ckpt-worker",
    "verify-integrity",
    "use-checkpoint-opt_param-scheduler",
    "use-mcore-models",
    "distributed-backend",
    "attention-backend",
    "exit-interval",
    "bf16-",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One recorded run."""

    name: str
    options: tuple[str, ...]
    environment: Mapping[str, str]
    first_peak_bytes: int
    steady_peak_bytes: int


def main() -> int:
    """Print the table; exit code 1 where a bar is missed, 2 where there is no truth."""
    options = _options()
    if options.rank is not None:
        return _run_rank(options)
    folder = options.truth / "megatron_golden" / "cases"
    if not folder.is_dir():
        print(f"no public truth at {folder}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    rows = [
        row
        for case in load_cases(folder)
        if options.case in (None, case.name)
        for row in _rows(case)
    ]
    if options.case in (None, "law"):
        rows.append(_law_row())
    print_rows(rows, title="Megatron's recorded peak memory")
    if options.json:
        write_rows(rows, options.json)
    return 0 if all(row.ok for row in rows) else 1


def load_cases(folder: Path) -> Iterator[Case]:
    """GPT cases of megatron-core's own layers, by name."""
    for path in sorted(folder.glob("*/gpt3*/golden_*h100*.json.gz")):
        sections = _sections(path.with_name("model_config.yaml").read_text(encoding="utf-8"))
        arguments = sections["MODEL_ARGS"]
        if arguments.get("transformer-impl") != "local":
            continue
        with gzip.open(path, "rt", encoding="utf-8") as file:
            peaks = json.load(file)["mem-max-allocated-bytes"]["values"]
        steady = [int(peak) for step, peak in peaks.items() if int(step) < RESUMED_AT]
        yield Case(
            name=path.parent.name,
            options=tuple(_example_options(arguments)),
            environment=sections["ENV_VARS"],
            first_peak_bytes=int(peaks["1"]),
            steady_peak_bytes=max(steady),
        )


def _sections(text: str) -> dict[str, dict[str, str]]:
    """Two levels of ``key: value``, which is all of YAML that the files use."""
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if not line.startswith(" "):
            current = sections.setdefault(key, {})
        else:
            current[key.strip().removeprefix("--")] = value.partition(" #")[0].strip()
    return sections


def _example_options(arguments: Mapping[str, str]) -> Iterator[str]:
    if "log-num-zeros-in-grad" in arguments:
        yield "--log-num-zeros-in-grad"
    for name, value in arguments.items():
        if name.startswith(IGNORED):
            continue
        yield f"--{name}"
        if value != "true":
            yield value
    yield from ("--train-iters", str(STEPS))


def _rows(case: Case) -> Iterator[Row]:
    peaks = _peaks(case.options, WORLD_SIZE - 1, WORLD_SIZE, environment=case.environment)
    if not peaks:
        yield Row.at_most(f"{case.name}: ran", float("nan"), 0.0)
        return
    for what, ours, recorded in (
        ("first step", peaks[0], case.first_peak_bytes),
        ("steady", peaks[-1], case.steady_peak_bytes),
    ):
        name = f"{case.name}: {what} peak, {ours:,} against {recorded:,} bytes"
        yield Row.at_most(name, 100 * abs(ours / recorded - 1), BAR_PERCENT, "%")


def _law_row() -> Row:
    """Least squares of the steady peak over 1 / DP."""
    peaks = []
    for width in LAW_WIDTHS:
        options = [*LLAMA_405B.split(), "--global-batch-size", str(8 * width)]
        world_size = LAW_MODEL_PARALLEL * width
        # More memory than any GPU: unfused attention over 8,192 tokens keeps its scores.
        found = _peaks(options, 0, world_size, memory_gib=4096)
        peaks.append(found[-1] / 2**30 if found else float("nan"))
    slope = float(np.polyfit(1 / np.array(LAW_WIDTHS), peaks, 1)[0])
    name = f"MLPerf Llama 3.1 405B: slope {slope:.3f} against {LAW_GIB} GiB x DP x CP"
    return Row.at_most(name, 100 * abs(slope / LAW_GIB - 1), LAW_BAR_PERCENT, "%")


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
    command = [sys.executable, str(Path(__file__)), *job, "--", *options]
    done = subprocess.run(
        command,
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


def _run_rank(options: argparse.Namespace) -> int:
    from null_rank import run_rank

    peaks = run_rank(
        options.rest,
        rank=options.rank,
        world_size=options.world_size,
        memory_gib=options.memory_gib or None,
    )
    print("peaks", *peaks)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", default=None, help="Only this one, or `law`.")
    parser.add_argument("--json", type=Path, default=None)
    for name in ("--rank", "--world-size", "--memory-gib"):
        parser.add_argument(name, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
