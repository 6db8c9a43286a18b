"""NVIDIA's published steps of Megatron-Bridge's performance recipes.

They are from the archive of its performance summaries (NVIDIA-NeMo/Megatron-Bridge, Apache-2.0)."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path("tables", "NVIDIA-NeMo__Megatron-Bridge__performance-summary-archive.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeModel:
    """A model that recipes train."""

    title: str
    """Name of the model in the table."""
    family: str
    """Family of its recipes."""
    parameters: float
    """Number of parameters that a token goes through."""
    is_dense: bool = False


MODELS: Mapping[str, BridgeModel] = {
    "llama3_70b": BridgeModel(title="LLAMA3_70B", family="llama", parameters=70.6e9, is_dense=True),
    "qwen3_30b_a3b": BridgeModel(title="Qwen3_30B_a3B", family="qwen", parameters=3.3e9),
    "qwen3_235b_a22b": BridgeModel(title="Qwen3_235B_a22B", family="qwen", parameters=22.2e9),
    "gpt_oss_120b": BridgeModel(title="GPT OSS 120B", family="gpt_oss", parameters=5.7e9),
    "deepseek_v3": BridgeModel(title="DeepSeekV3", family="deepseek", parameters=37.5e9),
    "kimi_k2": BridgeModel(title="Kimi_K2", family="kimi", parameters=32.6e9),
    "nemotron_3_nano": BridgeModel(title="Nemotron_3_Nano", family="nemotronh", parameters=3.6e9),
    "nemotron_3_super": BridgeModel(
        title="Nemotron_3_Super", family="nemotronh", parameters=12.7e9
    ),
}
"""Models by their names in recipes."""
PRECISIONS = {"bf16": "BF16", "fp8_cs": "FP8", "fp8_mx": "MXFP8", "nvfp4": "NVFP4"}
"""Names of precisions in the table, by their names in recipes."""
DTYPES = {
    "bf16": "BFloat16",
    "fp8_cs": "Float8_e4m3fn",
    "fp8_mx": "Float8_e4m3fn",
    "nvfp4": "Float4_e2m1fn_x2",
}
"""Element types of matrix products, by precision."""
RELEASES: Mapping[str, str] = {"26.04.01": "0.4", "26.06": "0.5", "26.06.01": "0.5"}
"""Megatron-Bridge's release in a NeMo container (``docs/releases`` of its repository)."""
_CASE = re.compile(r"(\w+), (\w+), (\d+) (\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeRecipe:
    """A recipe with the same sizes as the newest row for its model, GPUs and precision."""

    model: str
    precision: str
    gpus: int
    gpu: str
    """GPU as in the recipe's name: ``gb200``."""

    @property
    def case(self) -> str:
        """Name of the recipe in rows."""
        return f"{self.model}, {self.precision}, {self.gpus} {self.gpu}"

    @property
    def cluster(self) -> str:
        """Name of our preset."""
        return "h100-sxm" if self.gpu == "h100" else self.gpu

    @property
    def is_dense(self) -> bool:
        """Whether the model has no experts."""
        return MODELS[self.model].is_dense

    @staticmethod
    def parse(case: str) -> BridgeRecipe:
        """Parse a :attr:`case`.

        Raises:
            ValueError: the text is not such a name.
        """
        found = _CASE.fullmatch(case)
        if found is None:
            raise ValueError(f"'{case}' is no case such as 'llama3_70b, fp8_cs, 64 h100'")
        model, precision, gpus, gpu = found.groups()
        return BridgeRecipe(model=model, precision=precision, gpus=int(gpus), gpu=gpu)


RECIPES = tuple(
    map(
        BridgeRecipe.parse,
        (
            "llama3_70b, fp8_cs, 64 h100",
            "llama3_70b, fp8_cs, 64 gb200",
            "llama3_70b, fp8_mx, 64 gb200",
            "llama3_70b, nvfp4, 64 gb200",
            "llama3_70b, fp8_cs, 64 gb300",
            "llama3_70b, fp8_mx, 64 gb300",
            "llama3_70b, nvfp4, 64 gb300",
            "qwen3_30b_a3b, fp8_cs, 16 h100",
            "qwen3_30b_a3b, fp8_mx, 8 b300",
            "qwen3_30b_a3b, fp8_mx, 8 gb200",
            "qwen3_30b_a3b, fp8_mx, 8 gb300",
            "gpt_oss_120b, fp8_mx, 64 b300",
            "gpt_oss_120b, fp8_mx, 64 gb200",
            "gpt_oss_120b, fp8_mx, 64 gb300",
            "nemotron_3_nano, fp8_mx, 8 b300",
            "nemotron_3_nano, fp8_mx, 8 gb200",
            "nemotron_3_nano, fp8_mx, 8 gb300",
            "nemotron_3_super, fp8_mx, 64 b300",
            "nemotron_3_super, nvfp4, 64 b300",
            "nemotron_3_super, fp8_mx, 64 gb200",
            "nemotron_3_super, nvfp4, 64 gb200",
            "nemotron_3_super, fp8_mx, 64 gb300",
            "nemotron_3_super, nvfp4, 64 gb300",
            "deepseek_v3, fp8_mx, 256 gb200",
            "deepseek_v3, fp8_mx, 256 gb300",
            "qwen3_235b_a22b, fp8_mx, 256 gb200",
            "qwen3_235b_a22b, fp8_mx, 256 gb300",
            "kimi_k2, fp8_mx, 256 gb300",
        ),
    )
)
"""All recipes whose batch, microbatch and parallel sizes at commit 067f987 are those of the newest
row. Left out are rows with experts from containers before 26.06, because their programs were
different (the same layouts have become up to 1.6 times as fast); 405B, because its step has 192
microbatches or more; and tuning, because it needs a data set from a hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeStep:
    """One published row."""

    recipe: BridgeRecipe
    container: str
    """Version of the NeMo container, such as ``26.06``."""
    tokens: float
    """Tokens per step of the whole job."""
    tokens_per_s: float
    """Tokens per second and GPU."""

    @property
    def release(self) -> str:
        """Release of Megatron-Bridge that gave the row, such as ``0.5``."""
        return RELEASES[self.container]

    @property
    def step_ms(self) -> float:
        """Step time of the job."""
        return 1000 * self.tokens / (self.tokens_per_s * self.recipe.gpus)


def load_bridge_steps(truth: Path) -> list[BridgeStep]:
    """Load the newest row of each recipe.

    Rows with a footnote are left out: their footnotes tell of a regression or of another mapping.

    Raises:
        OSError: the table cannot be read.
        ValueError: the table is damaged, or has no row for a recipe.
    """
    with (truth / TABLE).open(encoding="utf-8", newline="") as text:
        newest: dict[tuple[str, ...], tuple[str, dict[str, str]]] = {}
        for container, model, row in _rows(text):
            key = (model, row["Precision"], row["#-GPUs"], row["System"])
            newest.setdefault(key, (container, row))
    return [_step(recipe, newest) for recipe in RECIPES]


def _step(
    recipe: BridgeRecipe, newest: Mapping[tuple[str, ...], tuple[str, dict[str, str]]]
) -> BridgeStep:
    system = f"DGX-{recipe.gpu.upper()}"
    key = (MODELS[recipe.model].title, PRECISIONS[recipe.precision], str(recipe.gpus), system)
    if key not in newest:
        raise ValueError(f"{TABLE} has no row for {recipe.case}")
    container, row = newest[key]
    return BridgeStep(
        recipe=recipe,
        container=container,
        tokens=float(row["GBS"]) * float(row["Sequence Length"]),
        tokens_per_s=float(row["Tokens / sec / GPU"]),
    )


def _rows(lines: Iterable[str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield container, model and cells of pre-training rows; the table has the newest first."""
    container = model = ""
    head: list[str] = []
    for cells in csv.reader(lines):
        if cells[0] == "#table":
            title = re.search(r"> (\S+) NeMo Container > Pre-Training.* Model: (.+)", cells[1])
            container, model = title.groups() if title else ("", "")
        elif cells[0] == "System":
            head = cells
        elif container and not cells[0].startswith("#") and "[^" not in "".join(cells):
            yield container, model, dict(zip(head, cells, strict=False))
