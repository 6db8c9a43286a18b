"""Layouts that NVIDIA tested, by Megatron-Bridge's own recipes: does ``fit`` say that they fit?

    python bench/bridge_layouts.py --bridge DIR [--truth DIR] [--case NAME]… [--rounds N]
                                   [--keep DIR] [--json PATH]

The layouts are those of NVIDIA/dgxc-benchmarking (``dgxc_layouts`` of the public truth): they say
that a job ran, and on how many GPUs. They do not say what else a program does. What does is a
recipe of NVIDIA-NeMo/Megatron-Bridge: a layout is here where a recipe of DIR has the same model,
GPU, precision and sizes, and runs on fewest GPUs, where each holds most. Left out, with the
reason, are layouts whose recipe needs what the null device does not have, and GPUs that no cluster
of ours has (B300, GB300).

That repository's own scripts start Megatron-Bridge of NeMo 26.04.01 (v0.4.1). With DIR at v0.4.1
the layouts run that are started so here (``launched``); with DIR at 067f987, whose recipes are the
same, all others.

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
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from bridge_release import launch_command, release_of
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from programs.models import hub_environment
from runs import Runs, folder_name, our_commit

GIB = 2**30
LIMIT_S = 3600
DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"


@dataclass(frozen=True, slots=True)
class Layout:
    """One row of the table, and the recipe that states its program."""

    model: str
    recipe: str
    """Without its ending; empty where ``launched`` states it."""
    gpu: str
    """Our name of the cluster."""
    world_size: int
    _: KW_ONLY
    tensor: int = 1
    stages: int = 1
    context: int = 1
    micro: int = 1
    """Sequences of a microbatch."""
    overrides: tuple[str, ...] = ()
    """Where the row differs from the recipe."""
    row: Mapping[str, str]
    """What else must stand in the table, by column."""
    launched: tuple[str, str, str] | None = None
    """Family, model and precision of a recipe of v0.4.1, which its launcher starts."""

    @property
    def gpu_name(self) -> str:
        """As the table has it."""
        return self.gpu.partition("-")[0].upper()

    @property
    def name(self) -> str:
        """For rows."""
        return f"{self.model}, {self.world_size:,} {self.gpu_name}"

    def script(self, bridge: Path, rounds: int) -> tuple[object, ...]:
        """As behind ``torchrun``."""
        replicas = self.world_size // (self.tensor * self.context * self.stages)
        batch = replicas * self.stages * rounds * self.micro
        if self.launched:
            family, model, precision = self.launched
            program = launch_command(
                bridge,
                family=family,
                model=model,
                gpu=self.gpu_name.lower(),
                gpus=self.world_size,
                precision=precision,
            )
            return (*program, *(("--global_batch_size", batch) if rounds else ()))
        sized = (f"train.global_batch_size={batch}",) if rounds else ()
        program = (bridge / "scripts" / "training" / "run_recipe.py",)
        recipe = ("--recipe", f"{self.recipe}_config", "--mode", "pretrain")
        return (*program, *recipe, *self.overrides, *sized)

    def is_in(self, table: Sequence[Mapping[str, str]]) -> bool:
        """Whether one of the table's rows is this layout."""
        sizes = {"TP": self.tensor, "PP": self.stages, "CP": self.context, "MBS": self.micro}
        wanted = {column: str(size) for column, size in sizes.items()} | dict(self.row)
        return any(
            self.gpu_name in row["section"].split() and wanted.items() <= row.items()
            for row in table
        )


TOKENIZER = ("tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=151936")
"""Of recipes that would fetch one: its size is all that counts."""
LAUNCHER_RELEASE = "0.4"
LLAMA_70B_FP8 = ("llama", "llama3_70b", "fp8_cs")
H100, B200, GB200 = "h100-sxm", "b200", "gb200"
LAYOUTS = (
    Layout(
        "Llama 8B, bf16, CP 2",
        "llama3_8b_pretrain_8gpu_h100_bf16",
        H100,
        8,
        context=2,
        row={"Model Size": "8b", "Datatype": "BF16"},
    ),
    Layout(
        "Llama 70B, bf16, TP 4, PP 4, CP 2, VP 5",
        "llama3_70b_pretrain_64gpu_h100_bf16",
        H100,
        64,
        tensor=4,
        stages=4,
        context=2,
        row={"Model Size": "70b", "Datatype": "BF16"},
    ),
    # The table says microbatches of 2, and contradicts itself: 2 replicas of 4 microbatches of 2
    # sequences are no batch of 256. The script that ran it (llama3.1/launch.sh) takes the recipe's.
    Layout(
        "Llama 70B, FP8, TP 4, PP 8, VP 5, microbatch 1",
        "",
        H100,
        64,
        tensor=4,
        stages=8,
        row={"Model Size": "70b", "Datatype": "FP8", "MBS": "2"},
        launched=LLAMA_70B_FP8,
    ),
    Layout(
        "Llama 405B, bf16, TP 8, PP 8, CP 2, VP 8",
        "llama31_405b_pretrain_1024gpu_h100_bf16",
        H100,
        1024,
        tensor=8,
        stages=8,
        context=2,
        row={"Model Size": "405b", "Datatype": "BF16"},
    ),
    Layout(
        "Llama 405B, FP8, TP 8, PP 8, CP 2, VP 8",
        "llama31_405b_pretrain_1024gpu_h100_fp8cs",
        H100,
        1024,
        tensor=8,
        stages=8,
        context=2,
        row={"Model Size": "405b", "Datatype": "FP8"},
    ),
    Layout(
        "Llama 70B, FP8, TP 2, PP 4, VP 5",
        "llama3_70b_pretrain_64gpu_b200_fp8mx",
        B200,
        128,
        tensor=2,
        stages=4,
        row={"Model Size": "70b", "Datatype": "FP8"},
    ),
    Layout(
        "Llama 70B, FP8, FSDP",
        "llama3_70b_pretrain_64gpu_b200_fp8cs",
        B200,
        64,
        row={"Model Size": "70b", "Datatype": "FP8", "FSDP": "True"},
    ),
    Layout(
        "Qwen3 235B, bf16, TP 2, PP 8, EP 32, VP 4",
        "qwen3_235b_a22b_pretrain_256gpu_h100_bf16",
        H100,
        256,
        tensor=2,
        stages=8,
        row={"Layers": "94", "Precision": "BF16"},
    ),
    Layout(
        "Qwen3 30B, bf16, EP 16",
        "qwen3_30b_a3b_pretrain_16gpu_h100_bf16",
        H100,
        16,
        overrides=TOKENIZER,
        row={"Layers": "48", "Precision": "BF16", "EP": "16"},
    ),
    Layout(
        "Qwen3 30B, bf16, EP 8",
        "qwen3_30b_a3b_pretrain_8gpu_b200_bf16",
        B200,
        32,
        micro=4,
        overrides=TOKENIZER,
        row={"Layers": "48", "Precision": "BF16", "EP": "8"},
    ),
    Layout(
        "DeepSeek-V3, bf16, TP 2, PP 8, EP 64, VP 4",
        "deepseek_v3_pretrain_1024gpu_h100_bf16",
        H100,
        1024,
        tensor=2,
        stages=8,
        row={"Layers": "61", "Precision": "BF16"},
    ),
    Layout(
        "Llama 8B, FP8",
        "llama3_8b_pretrain_8gpu_gb200_fp8cs",
        GB200,
        8,
        micro=2,
        row={"Model Size": "8b", "Datatype": "FP8", "FSDP": "False"},
    ),
    Layout(
        "Llama 70B, FP8, FSDP",
        "",
        GB200,
        64,
        micro=2,
        row={"Model Size": "70b", "Datatype": "FP8", "FSDP": "True"},
        launched=LLAMA_70B_FP8,
    ),
    Layout(
        "Qwen3 30B, bf16, EP 8",
        "qwen3_30b_a3b_pretrain_8gpu_gb200_bf16",
        GB200,
        16,
        micro=4,
        overrides=TOKENIZER,
        row={"Layers": "48", "Precision": "BF16", "EP": "8"},
    ),
    Layout(
        "Qwen3 235B, bf16, PP 8, EP 8",
        "qwen3_235b_a22b_pretrain_256gpu_gb200_bf16",
        GB200,
        256,
        stages=8,
        row={"Layers": "94", "Precision": "BF16"},
    ),
    Layout(
        "DeepSeek-V3, bf16, PP 4, EP 64, VP 4",
        "deepseek_v3_pretrain_256gpu_gb200_bf16",
        GB200,
        256,
        stages=4,
        row={"Layers": "61", "EP": "64", "Precision": "NVFP4/FP8/BF16"},
    ),
    Layout(
        "Llama 70B, NVFP4, TP 2, PP 4, VP 5",
        "llama3_70b_pretrain_64gpu_b200_nvfp4",
        B200,
        64,
        tensor=2,
        stages=4,
        row={"Model Size": "70b", "Datatype": "NVFP4"},
    ),
    Layout(
        "Llama 405B, NVFP4, TP 4, PP 16, VP 8",
        "llama31_405b_pretrain_128gpu_b200_nvfp4",
        B200,
        256,
        tensor=4,
        stages=16,
        row={"Model Size": "405b", "Datatype": "NVFP4"},
    ),
    Layout(
        "DeepSeek-V3, NVFP4, PP 4, EP 64, VP 4",
        "deepseek_v3_pretrain_256gpu_gb200_nvfp4",
        GB200,
        256,
        stages=4,
        row={"Layers": "61", "EP": "64", "Precision": "NVFP4/FP8/BF16"},
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
        if not layout.is_in(rows):
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
    is_launcher = release_of(asked.bridge) == LAUNCHER_RELEASE
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        environment = hub_environment(folder / "huggingface")
        runs = Runs(folder, limit_s=LIMIT_S, environment=environment)
        for layout in LAYOUTS:
            is_asked = any(part in layout.name for part in asked.case or [""])
            if not is_asked or bool(layout.launched) != is_launcher:
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
