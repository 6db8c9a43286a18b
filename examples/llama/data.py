"""Synthetic tokens that a model can learn and that every layout splits the same way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from config import TrainConfig
from torch import Tensor

_STRIDES = 8


def batches(config: TrainConfig, dp_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels (next tokens) of each step on the CPU, both (samples_per_rank, seq_len).

    A sample counts upwards modulo the vocabulary from a random start by a random stride. All
    ranks draw the starts of the global batch and each keeps its own rows, so the global batch
    does not depend on the layout.
    """
    generator = torch.Generator().manual_seed(config.seed)
    rows = config.samples_per_rank
    mine = slice(dp_rank * rows, (dp_rank + 1) * rows)
    positions = torch.arange(config.seq_len + 1)
    for _ in range(config.steps):
        global_rows = (rows * config.layout.dp, 1)
        start = torch.randint(config.model.vocab, global_rows, generator=generator)[mine]
        stride = torch.randint(1, _STRIDES + 1, global_rows, generator=generator)[mine]
        sequence = (start + stride * positions) % config.model.vocab
        yield sequence[:, :-1], sequence[:, 1:]
