"""Megatron-LM's own records of peak memory on H100s, by the programs that gave them.

    python bench/megatron_goldens.py --megatron CLONE [--truth DIR] [--case NAME]… [--json PATH]

A record is what the last rank of a functional test of Megatron-LM logged at every step. It is run
by the code of the commit that brought its values (``megatron_history.py``), with the options that
the test had there, over Transformer Engine's Python code of that commit's container, through
``prismscale fit --capture LAST``. The last rank's peak is compared with the highest before the run
was resumed (step 51).

CLONE is a clone of NVIDIA/Megatron-LM with its history; trees and libraries are put into
``--work``. The Python of this bench is that of ``scripts/megatron-environment``.

What is not the tests' own: checkpoints are not written or read, and text is made up
(``megatron_data.py``). Left out are the tests of reinforcement learning, which are no training runs
of a fixed batch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any, ClassVar

import yaml

from megatron_data import BERT_DATA, GPT_DATA, make
from megatron_history import PEAKS, Origin, Repository, build_environment, transformer_engine
from prismscale.validation.rows import Row, finish, read_rows, renewed, write_rows
from runs import Runs, our_commit

DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
LIMIT_S = 3600
EARLY, RESUMED_AT = 5, 51
DENSE_BAR, OTHER_BAR, RUN_BAR = 0.2, 1.0, 0.9
MOVES = 0.05
"""Percent by which a record may grow after its first steps without a word."""
OTHERS = ("expert", "moe", "mixtral", "deepseek", "cp2", "cp4", "fp8", "ep2", "ep4", "muon")
"""In the names of records that hold more than dense layers: experts, context parallelism, FP8."""
WORLD_SIZES = {
    "bert_release": 64,
    "gpt3_15b_8t_release": 256,
    "gpt3_mcore_reruns_resume_check_grads": 1,
    "mixtral_8x22b": 128,
    "mixtral_8x7b": 128,
    "deepseekv3_proxy": 128,
}
"""By the beginning of a record's name; 8 GPUs otherwise."""
SCRIPTS = {
    "bert": ("pretrain_bert.py", "examples/bert/pretrain_bert.py"),
    "t5": ("pretrain_t5.py", "examples/t5/pretrain_t5.py"),
    "hybrid_flextron": ("megatron/elastification/pretrain_hybrid_flex.py",),
    "hybrid": ("pretrain_mamba.py", "pretrain_hybrid.py", "examples/mamba/pretrain_mamba.py"),
    "multimodal-llava": ("pretrain_vlm.py", "examples/multimodal/pretrain_vlm.py"),
    "mimo": ("examples/mimo/train.py",),
}
"""By the first words of a name, else by group, where its tests' script lies or has lain."""
NOT_TRAINING = "gpt_grpo"
LEFT_OUT = (
    *("--save", "--load", "--async-", "--use-persistent-ckpt", "--exit-", "--auto-detect-ckpt"),
    *("--ckpt-fully", "--ckpt-assume", "--tensorboard-", "--wandb", "--use-checkpoint-"),
)
"""Options of checkpoints and logs."""
NOT_MADE_UP = {"mimo": "reads images in Energon's format, and a tokenizer of Hugging Face's hub"}
"""Records whose data the bench cannot make, by the beginning of their names."""
_GROWTH = "how many GPUs is not public, and is taken from what the optimizer's first step adds"
LOOKED_AT: Mapping[str, str] = {
    "bert_release_sm": "by it the parts were found that a bias's gradient takes while it is summed",
    "gpt3_15b_8t_release": _GROWTH,
    "gpt3_15b_8t_release_sm_gb200": _GROWTH,
    "mixtral_8x7b_alltoall_tp2pp4ep4_release_sm": _GROWTH,
}
"""Records by which something was found, with what it is; they are not scored."""
_ROUTER = "its router learns, and one rank's experts get more tokens; here they are spread evenly"
_UNKNOWN = "cause not found"
_TEXT = "its sequences depend on images and text, which are made up here"
REASONS: Mapping[str, str] = {
    "bert_mcore_tp2_pp2_frozen_resume_torch_dist": "the gradient of the output layer's bias: by"
    " ATen's rule its parts take 142 MB with 18 blocks for an output, and 16 blocks would meet it",
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed": _ROUTER,
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8": _ROUTER,
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental": f"{_ROUTER}; 0.7 % too much"
    " in the first step, after which the record grows by 1.8 GB more than its optimizer",
    "gpt3_mcore_te_tp2_pp2_mla": "the record grows at step 28; three or four steps are run here",
    "gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor": _UNKNOWN,
    "gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading": _UNKNOWN,
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph": _UNKNOWN,
    "mixtral_8x22b_tp2pp8ep8vpp1_release": _ROUTER,
    "multimodal_llava_mcore_te_tp1_pp1": _TEXT,
    "multimodal_llava_mcore_te_tp4_sp_cp2": _TEXT,
    "t5_mcore_tp4_pp1_resume_torch_dist": "the allocator hands out blocks of up to 1 MiB more than"
    " was asked for, 41 MB of them at this peak; which ones depends on everything freed before",
}
"""Why a record's bar is missed, as far as it is known."""
FAMILIES = {
    "FP8": "fp8",
    "MLA": "_mla",
    "hybrid": "^hybrid",
    "BERT": "^bert",
    "T5": "^t5",
    "multimodal": "^multimodal|^mimo",
    "experts": "expert|moe|mixtral|deepseek|_ep[248]_",
    "context parallel": "_cp[24]",
    "GPT of Megatron's own layers": "^gpt3_mcore_tp",
    "GPT": "",
}
"""Kinds of records by their names; the first that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """One record."""

    group: str
    name: str
    path: str
    """Of the record in the newest commit of the clone."""
    peaks: Mapping[str, int]
    """Bytes by step, as it writes them."""

    @property
    def steady_bytes(self) -> int:
        """The highest before the run was resumed."""
        return max(int(n) for step, n in self.peaks.items() if int(step) < RESUMED_AT)

    @property
    def early_bytes(self) -> int:
        """The highest in the first steps, before a router has learnt; some log every fifth."""
        return max(int(n) for step, n in self.peaks.items() if int(step) <= EARLY)

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return next((n for start, n in WORLD_SIZES.items() if self.name.startswith(start)), 8)

    @property
    def scripts(self) -> tuple[str, ...]:
        """Where the script may lie."""
        own = (paths for start, paths in SCRIPTS.items() if self.name.startswith(f"{start}_"))
        return next(own, SCRIPTS.get(self.group, ("pretrain_gpt.py",)))

    @property
    def bar(self) -> float:
        """Percent."""
        return OTHER_BAR if any(word in self.name for word in OTHERS) else DENSE_BAR


def load_goldens(folder: Path) -> Iterator[Golden]:
    """Records of training runs, by group and name."""
    for path in sorted(folder.glob("*/*/golden_*h100*.json.gz")):
        group, name = path.parts[-3:-1]
        with gzip.open(path, "rt", encoding="utf-8") as file:
            peaks = json.load(file).get(PEAKS, {}).get("values", {})
        if peaks and not name.startswith(NOT_TRAINING):
            kind = "gpt" if name.startswith("gpt") and group != "moe" else group
            golden = "golden_values_" + path.name.removeprefix("golden_").removesuffix(".gz")
            where = f"tests/functional_tests/test_cases/{kind}/{name}/{golden}"
            yield Golden(group=group, name=name, path=where, peaks=peaks)


class _Words(yaml.SafeLoader):
    """YAML whose values are the words that stand there: the launcher hands them on as they are."""

    yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}


def sections(text: str) -> dict[str, Any]:
    """A test's configuration: its options and variables by section, as text."""
    found: dict[str, Any] = yaml.load(text, Loader=_Words)
    return found


def options(
    arguments: Mapping[str, str | list[str]], places: Mapping[str, object]
) -> Iterator[str]:
    """The command line, as the tests' launcher makes it, with ``places`` for its variables."""
    for name, given in arguments.items():
        if name.startswith(LEFT_OUT):
            continue
        words = " ".join(given) if isinstance(given, list) else given
        # The launcher's shell takes backslashes and inner quotes away.
        value = Template(words.strip("\"'").replace("\\", "")).safe_substitute(places)
        yield name
        if isinstance(given, list) or re.fullmatch(r"\[.*\]", value):
            yield from value.strip("[]").split()
        elif value != "true":
            yield value


class Bench:
    """Runs records in one folder."""

    def __init__(self, work: Path, repository: Repository) -> None:
        self._work = work
        self._repository = repository
        self._places: dict[str, object] = {
            "DATA_PATH": work / "data",
            "DATA_CACHE_PATH": work / "data-cache",
            "REPEAT": 1,  # the launcher's count of runs
        }
        make(work / "data")
        (work / "data-cache").mkdir(exist_ok=True)

    def origin(self, golden: Golden) -> Origin:
        """Of one record."""
        return self._repository.origin(golden.path, golden.peaks)

    def commit_of(self, golden: Golden) -> str:
        """Of this project: that by which the record's run was made, which may be an older one."""
        file = self._commit_file(golden)
        return file.read_text() if file.exists() else our_commit()

    def _commit_file(self, golden: Golden) -> Path:
        return self._work / "runs" / golden.name / "commit"

    def peak_bytes(self, golden: Golden, origin: Origin) -> tuple[int, str]:
        """Of the last rank; 0 where the program failed, with the reason."""
        runs, script = self.program(golden, origin)
        last = golden.world_size - 1
        job = ("--cluster", origin.cluster, "--world-size", golden.world_size, "--capture", last)
        found = runs.fit(golden.name, job, script)
        if not found:
            return 0, runs.reason
        if not self._commit_file(golden).exists():
            self._commit_file(golden).write_text(our_commit())
        stages = found["variants"][0]["stages"]
        peak: int = next(s["record"]["peak_bytes"] for s in stages if s["rank"] == last)
        return peak, ""

    def program(self, golden: Golden, origin: Origin) -> tuple[Runs, tuple[object, ...]]:
        """Its test's command line as behind ``torchrun``, and what runs it in its environment."""
        tree = self._repository.checkout(origin.commit, self._work / "megatron")
        library = transformer_engine(origin.transformer_engine, self._work / "transformer-engine")
        given = sections(origin.config)
        paths = [str(tree), str(library), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {name: text.strip("\"'") for name, text in given["ENV_VARS"].items()}
        environment = variables | build_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
        folder = self._work / "runs"
        folder.mkdir(exist_ok=True)
        for name in ("gpt2", "bert-large-cased", "bert-large-uncased"):
            if not (folder / name).exists():
                (folder / name).symlink_to(self._work / "data" / name)
        more = ("--tensorboard-dir", folder / "tensorboard" / golden.name)
        text = BERT_DATA if golden.group == "bert" else GPT_DATA
        places = self._places | {"DATA_BLEND": f"{self._places['DATA_PATH']}/{text}"}
        line = (*options(given["MODEL_ARGS"], places), *more)
        script = next(tree / path for path in golden.scripts if (tree / path).is_file())
        return Runs(folder, limit_s=LIMIT_S, environment=environment), (script, *line)


def measure(golden: Golden, bench: Bench) -> Row:
    """The row of one record."""
    origin = bench.origin(golden)
    title = f"{golden.name}: {origin.commit[:10]}, Transformer Engine {origin.transformer_engine}"
    if origin.cluster != "h100-sxm":
        title += f", {origin.cluster}"
    reason = next((why for start, why in NOT_MADE_UP.items() if golden.name.startswith(start)), "")
    peak_bytes = 0
    if not reason:
        peak_bytes, reason = bench.peak_bytes(golden, origin)
    if not peak_bytes:
        return Row.at_least(f"{title}: completes ({reason})", 0, 1)
    its = golden.steady_bytes
    error = 100 * (peak_bytes / its - 1)
    said = f"{title}: peak {peak_bytes:,} of {its:,} bytes"
    if golden.early_bytes != its:
        said += f" ({golden.early_bytes:,} up to step {EARLY})"
    if golden.name in LOOKED_AT:
        return Row.told(f"{said}, not scored: {LOOKED_AT[golden.name]}", error, "%")
    return Row.at_most(said, abs(error), golden.bar, "%")


def noted(row: Row, golden: Golden, commit: str) -> Row:
    """``row`` with what it was measured of, how its record moves, and why its bar is missed."""
    parts = [f"prismscale {commit}"]
    moved = 100 * (golden.steady_bytes / golden.early_bytes - 1)
    found = re.search(": peak ([0-9,]+) of ", row.name)
    if found and moved >= MOVES:
        early = 100 * (int(found[1].replace(",", "")) / golden.early_bytes - 1)
        parts.append(f"the record grows by {moved:.2f} % after step {EARLY} ({early:+.2f} % there)")
    if not row.ok and golden.name in REASONS:
        parts.append(REASONS[golden.name])
    return replace(row, note="; ".join(parts))


def summary(rows: Sequence[Row], n_records: int) -> list[Row]:
    """How many records ran, how many are within their bars, and the errors of each family."""
    compared = {row.subject: row for row in rows if ": peak " in row.name}
    scored = {name: row for name, row in compared.items() if row.bar is not None}
    done = len(compared)
    found = [Row.at_least(f"{done} of {n_records} records run", done / n_records, RUN_BAR)]
    within = sum(row.ok for row in scored.values())
    if scored:
        said = f"{within} of {len(scored)} records within their bar"
        found.append(Row.told(said, within / len(scored)))
    by_family: dict[str, list[float]] = {}
    for name, row in scored.items():
        family = next(kind for kind, words in FAMILIES.items() if re.search(words, name))
        by_family.setdefault(family, []).append(row.value)
    for family, errors in sorted(by_family.items()):
        said = f"{family}, {len(errors)} record{'s' * (len(errors) > 1)}"
        found.append(Row.told(f"{said}, median", statistics.median(errors), "%"))
        found.append(Row.told(f"{said}, worst", max(errors), "%"))
    return found


def is_asked(golden: Golden, given: argparse.Namespace) -> bool:
    """Whether the command line asks for the record."""
    return any(fnmatchcase(golden.name, case) for case in given.case or ["*"])


def main() -> int:
    """Run the records, print the table, and write it where asked; returns the exit code."""
    given = arguments(__doc__)
    folder = given.truth / "megatron_golden" / "cases"
    if not folder.is_dir():
        print(f"no public truth at {folder}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    goldens = list(load_goldens(folder))
    chosen = [golden for golden in goldens if is_asked(golden, given)]
    names = {golden.name for golden in goldens}
    rows = [row for row in read_rows(given.json) if row.subject in names]
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(work, Repository(given.megatron))
        for golden in chosen:
            row = noted(measure(golden, bench), golden, bench.commit_of(golden))
            print(f"{row.name}: {row.value:.4g} {row.unit}; {row.note}", flush=True)
            rows = renewed(rows, [row])
            if given.json:
                write_rows(rows, given.json)
    rows = sorted(rows, key=lambda row: row.name) + summary(rows, len(goldens))
    return finish(rows, title="Megatron-LM's records of memory", json_path=given.json)


def arguments(doc: str | None) -> argparse.Namespace:
    """Those of the command line of a bench over these records; ``doc`` describes it."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, help="clone with history")
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--case", action="append", help="shell pattern of names; all by default")
    parser.add_argument("--work", type=Path, help="folder for trees, libraries and runs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
