"""Scores fused attention on public measurements of families on which nothing was fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_profile import KernelProfile
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.kernels.attention_rows import BACKWARD, AttentionRows, load_attention
from prismscale.validation.rows import Row

SHORTEST = 256
BARS = {"forward": Bars(median=8, p90=25), BACKWARD: Bars(median=12, p90=25)}
"""Bars by direction. Deterministic passes have none: their law was found on all rows."""
REMARKS = (
    "Attention: held-out families (heads, heads of keys, head size; for cuDNN's rows model, mask "
    "and length), 256 tokens or more, without windows. FlashAttention's rows are of servers for "
    "inference, which write keys and values to a cache and may read them through a table of pages: "
    "constants of the measuring programs (harness.toml). cuDNN's and FlashAttention-2's rows of "
    "training are few: 4 to 11 for each score.",
    "cuDNN's 8-bit backward pass on an H200 takes 0.9 to 1.1 times as long under a causal mask as "
    "without one (0.6 to 0.9 in its older rows): it computes what the mask leaves out, which the "
    "law does not have. `mxfp8` is held against the constants of per-tensor scaling. No public "
    "rows were found of FlashAttention-3's backward pass (cuDNN's is taken), and none of "
    "memory-efficient attention. Kernels of TensorRT-LLM, Triton and FlashAttention-4 are of no "
    "library whose calls the null device answers.",
    "A deterministic backward pass (cuDNN's, FlashAttention-2's) is not scored: what its fixed "
    "order costs was found on all its rows. It costs heads of 192 nothing on a GB200, and 8-bit "
    "ones neither.",
    "Sustained attention (SimuMax, B200) is wall time of a loop in Python, which a launch of about "
    "90 µs bounds at 4,096 tokens; how much of a burst lasts was read off its rows of 32,768 "
    "tokens and more. Neither is scored.",
)


def validate(truth: Path) -> Iterator[Row]:
    """Yield all rows.

    Raises:
        UsageError: there are no tables below ``truth``.
    """
    tables = load_attention(truth)
    bursts = [t for t in tables if not t.sustained]
    for name, group in groupby(bursts, key=lambda t: t.name):
        found = list(group)
        bars = BARS.get(found[0].direction, Bars()) if found[0].dtype != "mxfp8" else Bars()
        yield from error_rows(_called(name), np.concatenate([_errors(t) for t in found]), bars)
        for table in found if len(found) > 1 else []:
            yield from error_rows(f"{_called(name)}, {table.program} alone", _errors(table))
    yield from _sustained([t for t in tables if t.sustained])


def _called(name: str) -> str:
    gpu, operator, direction, dtype = name.split()
    return f"{gpu} attention {operator} {direction} {dtype}"


def _sustained(tables: Sequence[AttentionRows]) -> Iterator[Row]:
    for table in tables:
        name = f"{_called(table.name)}, sustained, {table.program}, all families"
        yield from error_rows(name, _errors(table, every_family=True))


def _errors(table: AttentionRows, *, every_family: bool = False) -> NDArray[np.float64]:
    """Return the signed errors, in %, of the rows that count."""
    counted = (table.shapes[1] >= SHORTEST) & (table.held_out | every_family)
    predicted = table.predicted_ns(KernelProfile.load(table.gpu))
    return 100 * (predicted / table.time_ns - 1)[counted]
