"""Whole steps as others measured them: what was trained, on what, and how long a step took."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prismscale.cluster import Cluster
from prismscale.errors import FormatError
from prismscale.validation.steps import golden_rows
from prismscale.validation.steps.bridge_rows import DTYPES, MODELS, load_bridge_steps
from prismscale.validation.steps.vtrain_rows import (
    VOCABULARY,
    Iteration,
    cluster_of,
    load_iterations,
)

SIMUMAX, TORCHTITAN, VTRAIN, BRIDGE = "simumax", "torchtitan", "vtrain", "bridge"
GOLDEN = "golden"
BRIDGE_GROUPS = {
    True: "Megatron-Bridge's recipes, dense",
    False: "Megatron-Bridge's recipes, experts",
}
"""By whether a model is dense."""
SIMUMAX_GPUS, SIMUMAX_LENGTH = 8, 4096
SEEN_SIMUMAX = (
    "llama3_70b_l12_tp1_pp2_dp4_mbc8_cef",
    "llama3_405b_l4_tp2_pp1_dp4_mbc32_cef",
    "llama3_405b_l4_tp8_pp1_dp1_mbc8_cef",
)
"""Runs whose steps were looked at while the constants of a B200 were still moving."""
SEEN_BRIDGE = ("nemotron_3_super, fp8_mx, 64 gb200", "qwen3_30b_a3b, fp8_mx, 8 gb300")
"""Recipes beside whose steps a mechanism was looked for: a Grace CPU's time for an operator, and
that kernels of several streams take turns."""
TITAN_TOKENS = 2 * 8192
"""Of a GPU in a step."""
LLAMA_8B = 8.03e9
TITAN_TABLE = "pytorch__torchtitan__llama3_h100_202412_torchtitan.csv"
TITAN_ROWS = {
    "FSDP": "",
    "FSDP + torch.compile": "-compiled",
    "FSDP + torch.compile + Float8": "-float8",
}
"""Published names, and how the bench's cases end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """One public row."""

    family: str
    case: str
    group: str
    """Rows that are summed up by themselves."""
    step_ms: float
    gpus: int
    gpu: str
    """Of the kernel profiles."""
    dtype: str
    """Of products."""
    parameters: float = 0.0
    """That a token goes through; 0 where no rule of thumb is held against the row."""
    tokens: float = 0.0
    """Of a step of the whole job; 0 as for ``parameters``."""
    is_scored: bool = True
    """Nothing was found by it, and no constant was moved after it was seen."""


def cluster_of_family(family: str, gpu: str) -> Cluster:
    """On which a family's runs with ``gpu``'s kernels are predicted."""
    return cluster_of() if family == VTRAIN else Cluster.load(gpu)


def load_measured(truth: Path) -> list[MeasuredStep]:
    """All public rows of all families.

    Raises:
        FormatError: a table is missing or damaged.
    """
    try:
        return [
            *_simumax(truth),
            *_torchtitan(truth),
            *_vtrain(truth),
            *_bridge(truth),
            *_golden(truth),
        ]
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"no public steps below '{truth}': {error}") from error


def _simumax(truth: Path) -> Iterator[MeasuredStep]:
    path = truth / "simumax_b200" / "megatron_steps.json"
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        case = row["case"]
        size = {key: int(n) for key, n in re.findall(r"(tp|cp|pp|seq)(\d+)", case)}
        replicas = SIMUMAX_GPUS // (size["tp"] * size.get("cp", 1) * size["pp"])
        yield MeasuredStep(
            family=SIMUMAX,
            case=case,
            group="Megatron-LM on 8 B200 (SimuMax)",
            step_ms=row["real_ms"],
            gpus=SIMUMAX_GPUS,
            gpu="b200",
            dtype="BFloat16",
            parameters=_simumax_parameters(row["model"], row["layer_num"]),
            tokens=row["mbc"] * replicas * size.get("seq", SIMUMAX_LENGTH),
            is_scored=case not in SEEN_SIMUMAX,
        )


_DENSE = {"llama3-70b": (8192, 28672, 8), "llama3-405b": (16384, 53248, 16)}
"""Width, inner width, heads of keys: as the launchers have them."""
_EXPERTS = {
    "deepseekv2": (5120, 12288, 6 * 1536 + 3072, 102400),
    "deepseekv3": (7168, 18432, 8 * 2048 + 2048, 129280),
}
"""Width, inner width of the dense layer, of all experts that a token sees, vocabulary."""
_DENSE_VOCABULARY, _HEAD = 128256, 128
_QUERY_RANK, _KEY_RANK, _HEADS, _ROTARY = 1536, 512, 128, 64


def _simumax_parameters(model: str, layers: int) -> float:
    if model in _DENSE:
        width, inner, key_heads = _DENSE[model]
        attention = 2 * width * width + 2 * width * key_heads * _HEAD
        return layers * (attention + 3 * width * inner) + 2 * width * _DENSE_VOCABULARY
    width, inner, seen, vocabulary = _EXPERTS[model]
    queries = width * _QUERY_RANK + _QUERY_RANK * _HEADS * (_HEAD + _ROTARY)
    keys = width * (_KEY_RANK + _ROTARY) + _KEY_RANK * _HEADS * 2 * _HEAD
    attention = queries + keys + _HEADS * _HEAD * width
    blocks = 3 * width * inner + (layers - 1) * 3 * width * seen
    return layers * attention + blocks + 2 * width * vocabulary


def _torchtitan(truth: Path) -> Iterator[MeasuredStep]:
    gpus = 0
    for row in csv.reader((truth / "tables" / TITAN_TABLE).open(encoding="utf-8")):
        if row[0] == "#table":
            found = re.search(r"1D Parallelism.* (\d+) GPUs", " ".join(row))
            gpus = int(found[1]) if found else 0
        elif gpus and row[0] in TITAN_ROWS:
            yield MeasuredStep(
                family=TORCHTITAN,
                case=f"8b-{gpus}{TITAN_ROWS[row[0]]}",
                group="torchtitan's 8B on 8 and 128 H100",
                step_ms=1000 * TITAN_TOKENS / float(row[1].replace(",", "")),
                gpus=gpus,
                gpu="h100-96g",
                dtype="BFloat16",
                parameters=LLAMA_8B,
                tokens=gpus * TITAN_TOKENS,
            )


def _vtrain(truth: Path) -> Iterator[MeasuredStep]:
    for row in load_iterations(truth / "vtrain_a100"):
        yield MeasuredStep(
            family=VTRAIN,
            case=row.name,
            group=f"Megatron-LM on A100s (vTrain), {row.family}",
            step_ms=row.time_ms,
            gpus=row.gpus,
            gpu="a100-80g",
            dtype="Half",
            parameters=_vtrain_parameters(row),
            tokens=row.batch * row.length,
            is_scored=row.is_scored,
        )


def _vtrain_parameters(row: Iteration) -> float:
    return 12.0 * row.layers * row.hidden**2 + VOCABULARY * row.hidden


def _bridge(truth: Path) -> Iterator[MeasuredStep]:
    for row in load_bridge_steps(truth):
        recipe = row.recipe
        yield MeasuredStep(
            family=BRIDGE,
            case=recipe.case,
            group=BRIDGE_GROUPS[recipe.is_dense],
            step_ms=row.step_ms,
            gpus=recipe.gpus,
            gpu=recipe.cluster,
            dtype=DTYPES[recipe.precision],
            parameters=MODELS[recipe.model].parameters,
            tokens=row.tokens,
            is_scored=recipe.case not in SEEN_BRIDGE,
        )


def _golden(truth: Path) -> Iterator[MeasuredStep]:
    for row in golden_rows.load_golden_steps(truth):
        yield MeasuredStep(
            family=GOLDEN,
            case=row.name,
            group=f"Megatron-LM's tests on 8 H100, {row.family}",
            step_ms=row.step_ms,
            gpus=golden_rows.GPUS,
            gpu=golden_rows.GPU,
            dtype="BFloat16",
            is_scored=row.is_scored,
        )
