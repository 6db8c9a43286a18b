"""Layouts that NVIDIA tested, by Megatron-Bridge's own recipes: does ``fit`` say that they fit?

    python bench/bridge_layouts.py --bridge DIR [--truth DIR] [--case NAME]… [--rounds N]
                                   [--keep DIR] [--json PATH]

The layouts are those of NVIDIA/dgxc-benchmarking (``dgxc_layouts`` of the public truth): they say
that a job ran, and on how many GPUs. They do not say what else a program does. What does is a
recipe of NVIDIA-NeMo/Megatron-Bridge: a layout is here where a recipe of DIR (at 067f987) has the
same model, GPU, precision and sizes, and runs on fewest GPUs, where each holds most. Left out, with
the reason, are layouts whose recipe needs what the null device does not have, and GPUs that no
cluster of ours has (GB200, B300, GB300).

A step of a recipe has up to 256 microbatches. What a rank holds is settled after as many as its
pipeline is deep, so that ``train.global_batch_size`` is set to ``--rounds`` times the pipeline's
depth for each replica (2 if not given; 0 leaves it as the recipe has it). Where both were run, they
are rows side by side.

The Python of this bench is that of ``scripts/bridge-environment``.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from programs.models import write_hub
from runs import Runs, folder_name, our_commit

GIB = 2**30
LIMIT_S = 3600
DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One row of the table, and the recipe that states its program."""

    name: str
    recipe: str
    gpu: str
    """Our name of the cluster."""
    world_size: int
    replica: int
    """GPUs of one replica of the data: tensor, context and pipeline parallel."""
    stages: int
    micro: int
    """Sequences of a microbatch."""
    row: Mapping[str, str]
    """What must stand in the table, by column."""
    overrides: tuple[str, ...] = ()
    """Where the row differs from the recipe."""

    def script(self, bridge: Path, rounds: int) -> tuple[object, ...]:
        """As behind ``torchrun``."""
        batch = self.world_size // self.replica * self.stages * rounds * self.micro
        sized = (f"train.global_batch_size={batch}",) if rounds else ()
        program = bridge / "scripts" / "training" / "run_recipe.py"
        return (program, "--recipe", self.recipe, "--mode", "pretrain", *self.overrides, *sized)


def _layout(
    name: str,
    recipe: str,
    gpu: str,
    world_size: int,
    *,
    tensor: int = 1,
    stages: int = 1,
    context: int = 1,
    micro: int = 1,
    overrides: tuple[str, ...] = (),
    **row: str,
) -> Layout:
    """``row``: further columns of the table; its "Model Size" is ``Model_Size`` here."""
    told = {"TP": str(tensor), "PP": str(stages), "CP": str(context), "MBS": str(micro)} | row
    return Layout(
        name=f"{name}, {world_size:,} {gpu.partition('-')[0].upper()}",
        recipe=f"{recipe}_config",
        gpu=gpu,
        world_size=world_size,
        replica=tensor * stages * context,
        stages=stages,
        micro=micro,
        row={column.replace("_", " "): value for column, value in told.items()},
        overrides=overrides,
    )


TOKENIZER = ("tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=151936")
"""Of recipes that would fetch one: its size is all that counts."""
H100, B200 = "h100-sxm", "b200"
BF16: dict[str, Any] = {"Datatype": "BF16"}
FP8: dict[str, Any] = {"Datatype": "FP8"}
QWEN_30B: dict[str, Any] = {"Layers": "48", "Precision": "BF16"}
LAYOUTS = (
    _layout(
        "Llama 8B, bf16, CP 2",
        "llama3_8b_pretrain_8gpu_h100_bf16",
        H100,
        8,
        context=2,
        Model_Size="8b",
        **BF16,
    ),
    _layout(
        "Llama 70B, bf16, TP 4, PP 4, CP 2, VP 5",
        "llama3_70b_pretrain_64gpu_h100_bf16",
        H100,
        64,
        tensor=4,
        stages=4,
        context=2,
        Model_Size="70b",
        **BF16,
    ),
    _layout(
        "Llama 70B, FP8, TP 4, PP 8, VP 5",
        "llama3_70b_pretrain_64gpu_h100_fp8cs",
        H100,
        64,
        tensor=4,
        stages=8,
        micro=2,
        overrides=("train.micro_batch_size=2",),
        Model_Size="70b",
        **FP8,
    ),
    # The row above contradicts itself: 2 replicas of 4 microbatches of 2 sequences are no batch of
    # 256, and the recipe's microbatch is one sequence.
    _layout(
        "Llama 70B, FP8, TP 4, PP 8, VP 5, microbatch 1",
        "llama3_70b_pretrain_64gpu_h100_fp8cs",
        H100,
        64,
        tensor=4,
        stages=8,
        MBS="2",
        Model_Size="70b",
        **FP8,
    ),
    _layout(
        "Llama 405B, bf16, TP 8, PP 8, CP 2, VP 8",
        "llama31_405b_pretrain_1024gpu_h100_bf16",
        H100,
        1024,
        tensor=8,
        stages=8,
        context=2,
        Model_Size="405b",
        **BF16,
    ),
    _layout(
        "Llama 405B, FP8, TP 8, PP 8, CP 2, VP 8",
        "llama31_405b_pretrain_1024gpu_h100_fp8cs",
        H100,
        1024,
        tensor=8,
        stages=8,
        context=2,
        Model_Size="405b",
        **FP8,
    ),
    _layout(
        "Llama 70B, FP8, TP 2, PP 4, VP 5",
        "llama3_70b_pretrain_64gpu_b200_fp8mx",
        B200,
        128,
        tensor=2,
        stages=4,
        Model_Size="70b",
        **FP8,
    ),
    _layout(
        "Llama 70B, FP8, FSDP",
        "llama3_70b_pretrain_64gpu_b200_fp8cs",
        B200,
        64,
        FSDP="True",
        Model_Size="70b",
        **FP8,
    ),
    _layout(
        "Qwen3 235B, bf16, TP 2, PP 8, EP 32, VP 4",
        "qwen3_235b_a22b_pretrain_256gpu_h100_bf16",
        H100,
        256,
        tensor=2,
        stages=8,
        Layers="94",
        Precision="BF16",
    ),
    _layout(
        "Qwen3 30B, bf16, EP 16",
        "qwen3_30b_a3b_pretrain_16gpu_h100_bf16",
        H100,
        16,
        overrides=TOKENIZER,
        EP="16",
        **QWEN_30B,
    ),
    _layout(
        "Qwen3 30B, bf16, EP 8",
        "qwen3_30b_a3b_pretrain_8gpu_b200_bf16",
        B200,
        32,
        micro=4,
        overrides=TOKENIZER,
        EP="8",
        **QWEN_30B,
    ),
    _layout(
        "DeepSeek-V3, bf16, TP 2, PP 8, EP 64, VP 4",
        "deepseek_v3_pretrain_1024gpu_h100_bf16",
        H100,
        1024,
        tensor=2,
        stages=8,
        Layers="61",
        Precision="BF16",
    ),
)


def check(layouts: tuple[Layout, ...], table: Path) -> None:
    """Every layout stands in the table.

    Raises:
        SystemExit: one that does not.
    """
    with table.open(encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))
    for layout in layouts:
        named = layout.gpu.partition("-")[0].upper()
        if not any(
            named in row["section"] and all(row[k] == v for k, v in layout.row.items())
            for row in rows
        ):
            raise SystemExit(f"{table} has no row for {layout.name}: {dict(layout.row)}")


def measure(layout: Layout, bridge: Path, rounds: int, runs: Runs) -> list[Row]:
    """One recipe through ``fit``."""
    how = f", {rounds} rounds" if rounds else ", whole step"
    name = layout.name + how
    job = ("--cluster", layout.gpu, "--world-size", layout.world_size)
    found = runs.fit(folder_name(name), job, layout.script(bridge, rounds))
    note = f"prismscale {our_commit()}"
    if not found:
        missed = Row.at_least(f"{name}: completes", 0, 1)
        return [replace(missed, note=f"{note}; {runs.reason}")]
    fit = found["variants"][0]["fit"]
    held = fit["held_bytes"] / fit["capacity_bytes"]
    rows = [
        Row.at_least(f"{name}: fits", float(fit["fits"]), 1),
        Row.told(f"{name}: reserved", fit["reserved_bytes"] / GIB, "GiB"),
        Row.told(f"{name}: held, of the GPU's memory", held, ""),
        Row.told(f"{name}: fit", found["wall_s"], "s"),
    ]
    return [replace(row, note=note) for row in rows]


def main() -> int:
    """Run the layouts, print the table, and write it where asked; returns the exit code."""
    asked = _arguments()
    table = asked.truth / "dgxc_layouts" / "layouts.csv"
    if not table.is_file():
        print(f"no public truth at {table}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    check(LAYOUTS, table)
    rows = read_rows(asked.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_hub(folder / "huggingface")
        environment = {**ENVIRONMENT, "HF_HOME": str(folder / "huggingface")}
        runs = Runs(folder, limit_s=LIMIT_S, environment=environment)
        for layout in LAYOUTS:
            if not any(part in layout.name for part in asked.case or [""]):
                continue
            found = measure(layout, asked.bridge.absolute(), asked.rounds, runs)
            print(*(f"{r.name}: {r.value:.4g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if asked.json:
                write_rows(rows, asked.json)
    return finish(rows, title="Layouts that were tested", json_path=asked.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bridge", type=Path, required=True, help="checkout of Megatron-Bridge")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", action="append", help="part of a layout's name; all by default")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of microbatches; 0: the recipe's own"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
