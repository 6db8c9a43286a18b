"""Steps that NVIDIA publishes of Megatron-Bridge's performance recipes, by the recipes themselves.

    python bench/bridge_steps.py --bridge DIR [--truth DIR] [--case NAME]…
                                 [--keep DIR] [--json PATH]

A row of Megatron-Bridge's performance summaries (``tables`` of the public truth) states model,
GPUs, precision, batch and layout, and how many tokens a GPU trains on in a second. Each is what a
recipe gave in a NeMo container. The program is that container's: the release of Megatron-Bridge
in it, whose launcher sets environment and options (``programs/bridge_launch.py``), with its
Megatron-LM, torch, Transformer Engine and cuDNN. A tokenizer that has no file takes the place of
its own; recipes do not let it size the model. Routers spread tokens evenly, by the summaries' own
words ("we force-balance the token distribution among experts").

DIR is a checkout at v0.4.1 or v0.5.1: rows of its containers are run, others left out. The list
of rows (``bridge_rows.py``) and the bar were settled before a result was seen, and no constant was
moved for it since. B300 and GB300 are known by their data sheets alone.

The Python of this bench is that of ``scripts/bridge-environment``. Ranks are captured with
``--quick``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bridge_release import launch_command, release_of
from prismscale.validation.error_rows import error_rows
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from prismscale.validation.steps.bridge_rows import MODELS, RECIPES, BridgeStep, load_bridge_steps
from prismscale.validation.steps.measured import BRIDGE, BRIDGE_GROUPS
from programs.models import hub_environment
from runs import Runs, folder_name, median_row, our_commit, provenance

LIMIT_S = 5400
DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
TOKENIZER = ("tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=32000")
"""Of fewer words than any of the models has."""
STEP = ": step "


def command(row: BridgeStep, bridge: Path) -> tuple[object, ...]:
    """As behind ``torchrun``."""
    recipe = row.recipe
    program = launch_command(
        bridge,
        family=MODELS[recipe.model].family,
        model=recipe.model,
        gpu=recipe.gpu,
        gpus=recipe.gpus,
        precision=recipe.precision,
    )
    return (*program, *TOKENIZER)


def measure(row: BridgeStep, bridge: Path, runs: Runs) -> list[Row]:
    """One recipe through ``run``."""
    recipe = row.recipe
    job = ("--device", "null", "--cluster", recipe.cluster, "--world-size", recipe.gpus, "--quick")
    found = runs.run(folder_name(recipe.case), job, command(row, bridge))
    if not found:
        missed = Row.at_least(f"{recipe.case}: completes", 0, 1)
        return [replace(missed, note=f"prismscale {our_commit()}; {runs.reason}")]
    step_ms = found["step_ns"] / 1e6
    name = f"{recipe.case}{STEP}{step_ms:,.1f} of {row.step_ms:,.1f} ms, NeMo {row.container}"
    step = Row.told(name, 100 * (step_ms / row.step_ms - 1), "%")
    note = provenance(found, BRIDGE, recipe.cluster)
    return [replace(step, note=note), *median_row(recipe.case, found)]


def scores(rows: Sequence[Row]) -> Iterator[Row]:
    """Errors of the steps without variation."""
    error = {row.subject: row.value for row in rows if STEP in row.name}
    for is_dense, group in BRIDGE_GROUPS.items():
        cases = [recipe.case for recipe in RECIPES if recipe.is_dense == is_dense]
        yield from error_rows(group, [error[c] for c in cases if c in error], of="steps")


def main() -> int:
    """Run the recipes, print the table, and write it where asked; returns the exit code."""
    asked = _arguments()
    steps = load_bridge_steps(asked.truth)
    subjects = {step.recipe.case for step in steps}
    rows = [row for row in read_rows(asked.json) if row.subject in subjects]
    release = release_of(asked.bridge)
    parts = asked.case or [""]
    chosen = [s for s in steps if s.release == release and any(p in s.recipe.case for p in parts)]
    if not chosen:
        print(f"--bridge is at {release}, of which no row asked for is", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        environment = hub_environment(folder / "huggingface")
        runs = Runs(folder, limit_s=LIMIT_S, environment=environment)
        for step in chosen:
            found = measure(step, asked.bridge.absolute(), runs)
            print(*(f"{r.name}: {r.value:.4g} {r.unit}" for r in found), sep="\n", flush=True)
            rows = renewed(rows, found)
            if asked.json:
                write_rows([*rows, *scores(rows)], asked.json)
    rows += scores(rows)
    return finish(rows, title="Megatron-Bridge's recipes", json_path=asked.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bridge", type=Path, required=True, help="checkout at v0.4.1 or v0.5.1")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", action="append", help="part of a case's name; all by default")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
