"""vTrain's published iterations of Megatron-LM on A100s (VIA-Research/vTrain, MIT)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prismscale.cluster import Cluster

HOST_BOUND = 8 * 1024
"""Sequences times width of a microbatch below which the host limits the step (bench/kernels.py)."""
VOCABULARY = 50_257
CARDS = 4
"""Network cards of 200 Gb/s per node."""
PRESET = "a100-80g"

Model = tuple[int, int, int, int]
"""GPUs, global batch, width and layers, which all rows of a group share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One published row."""

    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    length: int
    tensor: int
    data: int
    stages: int
    time_ms: float

    @property
    def model(self) -> Model:
        """The values that it shares with the rows of its group."""
        return self.gpus, self.batch, self.hidden, self.layers

    @property
    def microbatches(self) -> int:
        """Number of microbatches per step in each replica."""
        return self.batch // self.data // self.micro_batch

    @property
    def is_one_node(self) -> bool:
        """Whether it ran on one node, which has eight GPUs."""
        return self.gpus <= 8

    @property
    def name(self) -> str:
        """Name of its row."""
        layout = f"TP {self.tensor}, PP {self.stages}, DP {self.data}"
        return f"{group_name(self.model)}, {layout}, microbatch {self.micro_batch}"

    @property
    def family(self) -> str:
        """Kind of row that is summarised separately."""
        if not self.is_one_node:
            return "several nodes"
        if self.stages > 1:
            return "one node, PP > 1"
        return "one node, TP > 1" if self.tensor > 1 else "one node, DP alone"

    @property
    def is_looked_at(self) -> bool:
        """Whether the slope over such rows was used to find out what one node recomputes."""
        layout = (self.tensor, self.data, self.stages)
        return self.is_one_node and layout == (1, 2, 1) and self.hidden == 2048

    @property
    def is_scored(self) -> bool:
        """Whether it is scored, because no constant rests on rows like it."""
        narrow = self.micro_batch * self.hidden < HOST_BOUND
        return not (self.is_one_node and self.tensor == 1 and narrow)


def group_name(model: Model) -> str:
    """Return the name of a group in rows."""
    gpus, batch, hidden, layers = model
    return f"{gpus} GPUs, {layers} layers of {hidden:,}, batch {batch:,}"


def load_iterations(folder: Path) -> list[Iteration]:
    """Load all published rows."""
    return [
        _iteration(row)
        for part in ("single", "multi")
        for row in _read(folder / f"ground_truth_{part}.csv")
    ]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def _iteration(row: Mapping[str, str]) -> Iteration:
    return Iteration(
        gpus=int(row["# GPUs"]),
        batch=int(row["global batch"]),
        micro_batch=int(row["micro batch"]),
        hidden=int(row["hidden size"]),
        heads=int(row["attention heads"]),
        layers=int(row["# layers"]),
        length=int(row["sequence length"]),
        tensor=int(row["tensor parallelism"]),
        data=int(row["data parallelism"]),
        stages=int(row["pipeline parallelism"]),
        time_ms=float(row["iteration time (ms)"]),
    )


def cluster_of() -> Cluster:
    """Return the cluster of the rows, which has 800 Gb/s of network per node."""
    return replace(Cluster.load(PRESET), nics_per_node=CARDS)
