"""Steps of NVIDIA's verified Megatron-Bridge runs, by the commands of their cards.

    python bench/bridge_cards.py --bridge DIR [--truth DIR] [--case NAME]…
                                 [--keep DIR] [--json PATH]

A card (``megatron_bridge_cards`` of the public truth) states a command and the mean of its last ten
steps. The command runs as it is, less what names files of the machine that ran it: its data (the
recipe's mock data comes in place of it, with sequences as long), its tokenizer (one of as many
words), and its checkpoints. Tokens are spread evenly over experts here. The cards say "natural
routing": how uneven that was is not known, and a step waits for the fullest expert. Where a card's
program was begun again from its checkpoint, that run's step is told beside: the same steps took up
to half as long again.

Lightning's GB200 card is of 28 July 2026 and may be of a container with Transformer Engine from
before 9 July, whose fused loss kept its gradient in the logits: with that code the program
allocates 157.5 GB here, where the card says 158.2, and 174.6 with the one that recipes ask for.

The Python of this bench is that of ``scripts/bridge-environment``. Ranks are captured with
``--quick``.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prismscale.analysis.result import RunResult
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from programs.models import hub_environment
from runs import Runs, folder_name, median_row, our_commit

LIMIT_S = 5400
DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
CARDS = Path("megatron_bridge_cards", "functional_training_rows.csv")
MEASURED, OFF = "step, measured", "step, off by"
"""Ends of rows' names; off is what a run shows, the forecast's median."""
OF_THE_LAUNCHER = ("--nodes", "--gpus-per-node", "--wait", "--additional-slurm-params")
OF_FILES = (
    "--dataset",
    "--save_dir",
    "--save_interval",
    "dataset.blend",
    "dataset.path_to_cache",
    "tokenizer.",
    "checkpoint.",
    "logger.save_config_filepath",
)
"""How options begin that name files."""
WITHOUT_FILES = ("checkpoint.load=null", "checkpoint.save=null", "checkpoint.async_save=false")
_STATED_PEAKS = re.compile(
    r"'peak_allocated_memory_gib': (?P<allocated_metric>[\d.]+), "
    r"'peak_reserved_memory_gib': (?P<reserved_metric>[\d.]+)"
    r"|memory is (?P<allocated>[\d.]+) GiB allocated and (?P<reserved>[\d.]+) GiB reserved"
)
"""Among a card's metrics, or in what it says of its result."""
BARS = Bars(median=12.0)
GB = 1e9
OPERATIONS_BAR = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A card whose program the null device runs."""

    card: str
    item: str
    cluster: str
    world_size: int
    """As its command's ``--nodes`` times ``--gpus-per-node``."""
    vocabulary: int
    """Of the model, for a tokenizer that has no file."""
    formula_differs: str = ""
    """Why Megatron's formula counts other operations than the program has; empty where not."""

    @property
    def name(self) -> str:
        """For rows."""
        return f"{self.card} {self.item}"

    def row(self, cards: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
        """Of the table."""
        (found,) = (c for c in cards if (c["card"], c["item"]) == (self.card, self.item))
        return found

    def resumed_ms(self, cards: Iterable[Mapping[str, str]]) -> Iterator[float]:
        """The step of the same program, begun again from its checkpoint, if that was run."""
        item = f"checkpoint_resume/{self.item.partition('/')[2]}"
        for other in cards:
            if (other["card"], other["item"]) == (self.card, item):
                yield float(other["step_time_ms"])

    def options(self, command: str) -> list[str]:
        """Of ``run_recipe.py``, from the card's command."""
        words = shlex.split(command)[1:]
        kept = [word for option in _options(words) if not _is_left_out(option) for word in option]
        tokenizer = f"tokenizer.vocab_size={self.vocabulary}"
        return [*kept, "tokenizer.tokenizer_type=NullTokenizer", tokenizer, *WITHOUT_FILES]


QWEN_WORDS, NEMOTRON_WORDS = 151_936, 131_072
LIGHTNING_FORMULA = "Mamba layers twice as wide as the model, which are 64 heads of 64 in 2,688"
PROGRAMS = (
    Card(
        card="qwen3-30b-a3b",
        item="pretrain/H100",
        cluster="h100-sxm",
        world_size=16,
        vocabulary=QWEN_WORDS,
    ),
    Card(
        card="qwen3-30b-a3b",
        item="pretrain/GB200",
        cluster="gb200",
        world_size=8,
        vocabulary=QWEN_WORDS,
    ),
    Card(
        card="nemotron-3-super-120b-a12b",
        item="pretrain/H100",
        cluster="h100-sxm",
        world_size=64,
        vocabulary=NEMOTRON_WORDS,
        formula_differs="not the tenth that fills experts up to their capacity",
    ),
    Card(
        card="nemotron-3.5-lightning",
        item="pretrain/H100",
        cluster="h100-sxm",
        world_size=16,
        vocabulary=NEMOTRON_WORDS,
        formula_differs=LIGHTNING_FORMULA,
    ),
    Card(
        card="nemotron-3.5-lightning",
        item="pretrain/GB200",
        cluster="gb200",
        world_size=8,
        vocabulary=NEMOTRON_WORDS,
        formula_differs=LIGHTNING_FORMULA,
    ),
)


def _options(words: list[str]) -> Iterator[list[str]]:
    """Words of the command, an option with its value."""
    rest = iter(words)
    option: list[str] = []
    for word in rest:
        is_override = "." in word.partition("=")[0] and "=" in word
        if (word.startswith("-") or is_override) and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _is_left_out(option: list[str]) -> bool:
    return option[0] in OF_THE_LAUNCHER or option[0].startswith(OF_FILES)


def measure(card: Card, cards: list[dict[str, str]], bridge: Path, runs: Runs) -> list[Row]:
    """One card through ``run``."""
    row = card.row(cards)
    script = bridge / "scripts" / "training" / "run_recipe.py"
    job = ("--device", "null", "--cluster", card.cluster, "--world-size", card.world_size)
    command = (script, *card.options(row["command"]))
    found = runs.run(folder_name(card.name), (*job, "--quick"), command)
    note = f"prismscale {our_commit()}"
    if not found:
        missed = Row.at_least(f"{card.name}: completes", 0, 1)
        return [replace(missed, note=f"{note}; {runs.reason}")]
    result = RunResult.from_json(found)
    predicted, real = found["step_ns"] / 1e6, float(row["step_time_ms"])
    shown, again = median_row(card.name, found), card.resumed_ms(cards)
    rows = [
        Row.told(f"{card.name}: step", predicted, "ms"),
        *shown,
        Row.told(f"{card.name}: {MEASURED}", real, "ms"),
        *(Row.told(f"{card.name}: {MEASURED} once resumed", ms, "ms") for ms in again),
        *(Row.told(f"{card.name}: {OFF}", 100 * (r.value / real - 1), "%") for r in shown),
        _operations(card, row, result),
        *_memory(card, row, result),
    ]
    return [replace(r, note=note) for r in rows]


def _operations(card: Card, row: Mapping[str, str], result: RunResult) -> Row:
    """The model's operations in a step, against what Megatron-LM's formula gives."""
    own = result.work.flops / result.world_size
    theirs = 1e9 * float(row["model_tflops_per_gpu"]) * float(row["step_time_ms"])
    off = abs(100 * (own / theirs - 1))
    name = f"{card.name}: model's operations, off by"
    if card.formula_differs:
        return Row.told(f"{name} (the formula counts {card.formula_differs})", off, "%")
    return Row.at_most(name, off, OPERATIONS_BAR, "%")


def _memory(card: Card, row: Mapping[str, str], result: RunResult) -> Iterator[Row]:
    """Peaks of the fullest captured rank, beside those that the card states, if it does.

    Megatron-Bridge logs gigabytes of 10⁹ bytes, and the cards call them GiB.
    """
    stated = _STATED_PEAKS.search(row["other_metrics"] + row["expected_result"])
    if stated is None:
        return
    ours = {
        "allocated": max(stage.peak_bytes or 0 for stage in result.stages) / GB,
        "reserved": max(stage.reserved_bytes or 0 for stage in result.stages) / GB,
    }
    for name, predicted in ours.items():
        real = float(stated[f"{name}_metric"] or stated[name])
        yield Row.told(f"{card.name}: {name}", predicted, "GB")
        yield Row.told(f"{card.name}: {name}, measured", real, "GB")
        yield Row.told(f"{card.name}: {name}, off by", 100 * (predicted / real - 1), "%")


def scores(rows: list[Row]) -> list[Row]:
    """How far the steps are off that runs show, over all cards."""
    off = [row.value for row in rows if row.name.endswith(OFF)]
    return list(error_rows("cards", off, BARS, of="steps"))


def main() -> int:
    """Run the cards, print the table, and write it where asked; returns the exit code."""
    asked = _arguments()
    with (asked.truth / CARDS).open(encoding="utf-8", newline="") as text:
        cards = list(csv.DictReader(text))
    rows = [row for row in read_rows(asked.json) if not row.name.startswith("cards")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        environment = hub_environment(folder / "huggingface")
        runs = Runs(folder, limit_s=LIMIT_S, environment=environment)
        for card in PROGRAMS:
            if any(part in card.name for part in asked.case or [""]):
                found = measure(card, cards, asked.bridge.absolute(), runs)
                rows = renewed(rows, found)
                if asked.json:
                    write_rows([*rows, *scores(rows)], asked.json)
    rows += scores(rows)
    return finish(rows, title="Cards of Megatron-Bridge", json_path=asked.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bridge", type=Path, required=True, help="checkout of Megatron-Bridge")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", action="append", help="part of a card's name; all by default")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
