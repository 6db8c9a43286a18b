"""Steps of Megatron-LM's functional tests on eight H100 (NVIDIA/Megatron-LM, BSD-3 style).

A test logs the time of every step. Its models are small: the host decides most of these steps.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

INDEX = Path("megatron_golden", "index_h100.csv")
GPU, GPUS = "h100-sxm", 8
NO_TRAINING = ("gpt_grpo", "mimo")
"""How the names of tests begin that are of reinforcement learning, or whose images are no data that
a bench can make."""
RELEASE = "_release"
"""In the name of a test whose number of GPUs is not public."""
FAMILIES = {
    "gpt": "GPT",
    "moe": "experts",
    "bert": "BERT",
    "t5": "T5",
    "hybrid": "hybrid",
    "multimodal-llava": "multimodal",
}
"""Families of tests, by their folder."""
TO_FIT = "GPT"
"""The family on which the host's time may be fitted, so that it is not scored: settled before the
step of any test was predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenStep:
    """The step of one test."""

    name: str
    family: str
    """One of :data:`FAMILIES`' values."""
    step_ms: float
    """Median over the steps that the test logged, without the first."""

    @property
    def is_scored(self) -> bool:
        """Whether no constant may rest on it."""
        return self.family != TO_FIT


def load_golden_steps(truth: Path) -> list[GoldenStep]:
    """Load the steps of all tests whose program and number of GPUs are known.

    Raises:
        OSError: the table cannot be read.
        ValueError, KeyError: the table is damaged.
    """
    with (truth / INDEX).open(encoding="utf-8", newline="") as text:
        return [
            GoldenStep(
                name=row["test"],
                family=FAMILIES[row["group"]],
                step_ms=1000 * float(row["iter_median_s"]),
            )
            for row in csv.DictReader(text)
            if row["iter_median_s"]
            and RELEASE not in row["test"]
            and not row["test"].startswith(NO_TRAINING)
        ]
