"""Real programs on the null device beside published measurements.

    python bench/null_programs.py [--case 8b-8]… [--json PATH]

Run with a Python that has torchtitan 0.3.0 (the CPU build of torch 2.13) and prismscale. Reserved
memory and tokens per second stand beside torchtitan's own benchmark of December 2024 (Llama-3.1 8B
on H100 of 96 GB and 2.4 TB/s): its reported memory is the reserved peak. The cases 8b-8 and 8b-128
have the norms and the attention that torchtitan had then (``titan_2024``); 8b-8-now has those of
0.3.0 and no figure to stand beside. The ``-compiled`` cases compile the blocks with inductor, which
needs Triton, and not the loss: torchtitan had that switched off then. The tokenizer is made here,
the text too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prismscale.analysis.emulated import KernelKind, coverage
from prismscale.graph.io import load_trace
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from prismscale.validation.steps.measured import TORCHTITAN
from runs import HERE, PARTIAL, TITAN, Runs, median_row, provenance

GIB = 2**30
LIMIT_S = 3600
"""Of one case: several times what the longest may take."""
SHARED = ("--dataloader.dataset", "c4_test", "--metrics.log_freq", "1", "--training.steps", "6")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program at one size, and what was published for it."""

    name: str
    world_size: int
    args: tuple[str, ...]
    tokens_per_rank: float
    """In one step."""
    cluster: str = "h100-96g"
    options: tuple[str, ...] = ()
    """For ``prismscale run``."""
    memory_gib: float | None = None
    tokens_per_s: float | None = None
    """Of one GPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    most_wall_s: float | None = None
    most_rss_gib: float | None = None

    @property
    def job(self) -> tuple[object, ...]:
        """Where it runs, as options of ``run`` and ``fit``."""
        fixed = ("--device", "null", "--cluster", self.cluster, "--world-size", self.world_size)
        return (*fixed, *self.options)

    def script(self, folder: Path) -> tuple[object, ...]:
        """The program and its arguments; ``folder`` is one that was prepared."""
        assets = ("--hf_assets_path", folder / "tokenizer")
        return (TITAN, "--module", "titan_configs", *self.args, *PARTIAL, *SHARED, *assets)


EIGHT = ("--config", "llama3_8b_2024", "--training.local_batch_size", "2")
COMPILED = (*EIGHT, "--compile.enable", "--compile.components", "model")
FLASH = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
"""At the end of 2024 torch did not choose cuDNN's attention by itself (pytorch PR 138522)."""
LARGE = (
    *("--config", "llama3_405b_bf16", "--training.local_batch_size", "16"),
    *("--parallelism.tensor_parallel_degree", "8", "--parallelism.pipeline_parallel_degree", "8"),
    *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
)
WIDE = (
    *("--config", "llama3_70b", "--training.local_batch_size", "16"),
    *("--parallelism.tensor_parallel_degree", "8", "--parallelism.pipeline_parallel_degree", "16"),
    *("--parallelism.pipeline_parallel_schedule", "1F1B"),
)
CASES = (
    Case(
        name="8b-8",
        world_size=8,
        args=EIGHT,
        tokens_per_rank=2 * 8192,
        memory_gib=82.4,
        tokens_per_s=5762,
        environment=FLASH,
    ),
    Case(
        name="8b-128",
        world_size=128,
        args=EIGHT,
        tokens_per_rank=2 * 8192,
        memory_gib=67.0,
        tokens_per_s=5605,
        environment=FLASH,
    ),
    Case(
        name="8b-8-compiled",
        world_size=8,
        args=COMPILED,
        tokens_per_rank=2 * 8192,
        memory_gib=77.0,
        tokens_per_s=6667,
        environment=FLASH,
    ),
    Case(
        name="8b-128-compiled",
        world_size=128,
        args=COMPILED,
        tokens_per_rank=2 * 8192,
        memory_gib=62.0,
        tokens_per_s=6514,
        environment=FLASH,
    ),
    Case(
        name="8b-8-now",
        world_size=8,
        args=("--config", "llama3_8b_whole_loss", "--training.local_batch_size", "2"),
        tokens_per_rank=2 * 8192,
    ),
    Case(
        name="8b-64",
        world_size=64,
        args=("--config", "llama3_8b"),
        tokens_per_rank=8192,
        cluster="h100-sxm",
        most_wall_s=15,
    ),
    Case(
        name="405b",
        world_size=512,
        args=LARGE,
        tokens_per_rank=16 * 8192 * 8 / 512,
        cluster="h100-sxm",
        most_wall_s=240,
        most_rss_gib=12,
    ),
    Case(
        name="70b-8192",
        world_size=8192,
        args=WIDE,
        tokens_per_rank=16 * 8192 * 64 / 8192,
        cluster="h100-sxm",
        most_wall_s=300,
        most_rss_gib=12,
    ),
)


def prepare(folder: Path) -> None:
    """A byte-level tokenizer and a little text, where torchtitan looks for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    tokenizer.add_special_tokens(list(names.values()))
    assets, data = folder / "tokenizer", folder / "tests/assets/c4_test"
    assets.mkdir(parents=True)
    data.mkdir(parents=True)
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(json.dumps(names))
    lines = (json.dumps({"text": f"The quick brown fox {i} jumps. " * 90}) for i in range(2_000))
    (data / "data.json").write_text("\n".join(lines) + "\n")


def measure(case: Case, runs: Runs) -> list[Row]:
    """Run one case through the command line."""
    found = runs.run(case.name, case.job, case.script(runs.folder))
    if not found:
        return [Row.at_least(f"{case.name}: completes", 0, 1)]
    reserved = reserved_bytes(runs.folder / case.name, found["captured"]) / GIB
    tokens = case.tokens_per_rank / (found["step_ns"] / 1e9)
    wall, rss = sum(found["wall_s"].values()), found["peak_rss_bytes"] / GIB
    return [
        *_beside(f"{case.name}: reserved memory", reserved, case.memory_gib, 0.03, "GiB"),
        *_beside(f"{case.name}: tokens/s a GPU", tokens, case.tokens_per_s, 0.08, ""),
        *_step(case, found),
        _covered(case, found["kernels"]),
        _at_most(f"{case.name}: wall time", wall, case.most_wall_s, "s"),
        _at_most(f"{case.name}: memory of all our processes", rss, case.most_rss_gib, "GiB"),
        Row.told(f"{case.name}: captured ranks", len(found["captured"])),
    ]


def _step(case: Case, found: dict[str, Any]) -> list[Row]:
    """The step, where one was published, and its forecast's median."""
    if case.tokens_per_s is None:
        return []
    note = provenance(found, TORCHTITAN, case.cluster)
    step = Row.told(f"{case.name}: step", found["step_ns"] / 1e6, "ms")
    return [replace(step, note=note), *median_row(case.name, found)]


def reserved_bytes(out: Path, captured: Sequence[int]) -> int:
    """Most that a captured rank of the run in ``out`` reserved."""
    newest = max(out.glob("captures/*"), key=lambda path: path.stat().st_mtime)
    traces = [load_trace(newest / f"rank-{rank}.parquet") for rank in captured]
    return max(trace.memory.reserved_bytes or 0 for trace in traces if trace.memory)


def _covered(case: Case, kernels: Sequence[dict[str, Any]]) -> Row:
    """Share of the kernels' time that does not rest on a default."""
    share = coverage(KernelKind(**kernel) for kernel in kernels)
    return Row.at_least(f"{case.name}: kernel time from rules of cost", share, 0.99)


def _beside(name: str, value: float, published: float | None, bar: float, unit: str) -> list[Row]:
    rows = [Row.told(name, value, unit)]
    if published is not None:
        error = abs(value / published - 1)
        rows.append(Row.at_most(f"{name}, relative to {published:g} {unit}", error, bar))
    return rows


def _at_most(name: str, value: float, bar: float | None, unit: str) -> Row:
    return Row.told(name, value, unit) if bar is None else Row.at_most(name, value, bar, unit)


def difference(rows: Sequence[Row]) -> list[Row]:
    """What 128 GPUs save of the memory that 8 need, beside the published saving."""
    by_name = {row.name: row.value for row in rows}
    pair = [by_name.get(f"{name}: reserved memory") for name in ("8b-8", "8b-128")]
    if None in pair:
        return []
    saved = pair[0] - pair[1]  # type: ignore[operator]
    return [
        Row.told("8b: saved by 128 instead of 8 GPUs", saved, "GiB"),
        Row.at_most("8b: the same, difference to 15.4 GiB", abs(saved - 15.4), 1.0, "GiB"),
    ]


def main() -> int:
    """Run the cases, print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer").exists():
            prepare(folder)
        chosen = [case for case in CASES if not options.case or case.name in options.case]
        names = {case.name for case in CASES}
        rows = [row for row in read_rows(options.json) if row.subject in names]
        for case in chosen:
            runs = Runs(folder, limit_s=LIMIT_S, environment=case.environment)
            rows = renewed(rows, measure(case, runs))
            if options.json:
                write_rows([*rows, *difference(rows)], options.json)
        rows += difference(rows)
    return finish(rows, title="Programs on the null device", json_path=options.json)


if __name__ == "__main__":
    # For ``--module titan_configs``.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
