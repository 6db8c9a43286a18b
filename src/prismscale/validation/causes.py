"""Known causes of missed bars, which the accuracy page shows beside the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prismscale.validation.rows import Row

_FLOAT32 = (
    "constants of float32 kernels with a warm L2 cache (NeuSight); these are of 16 bits and cold"
)
_CACHED = (
    "what lies in the L2 cache is taken from the operands' size; it depends on what ran before"
)
_SOFTMAX = (
    "NeuSight's float32 softmax: an H100's own calls are 1.6 times as slow as its rows; an A100's "
    "were not measured"
)
_SHEET = (
    "a data sheet does not say what a library reaches: the best product runs at 87 % of the peak "
    "on an A100, at 80 % on an H100 (stas00, ml-engineering)"
)
CAUSES = (
    (
        "steps by other prices",
        "the host's time was fitted anew; these programs, which run for long, were not run since",
    ),
    ("ST, nodes 1.6-14 % apart", "all nodes at the slow end cost 11.7 %, and the best order hides"),
    (
        "p99, p90 of errors",
        "two to six steps of a run decide its p99: halves of one run miss it too",
    ),
    ("one node of B200, ≥ 64 MiB", "reduce_scatter of two GPUs, and bandwidth that still grows"),
    ("80 H100, ≥ 512 MiB, all_reduce", "constants are of 1, 2 and 4 GPUs of a node; 8 are slower"),
    ("in a running model", _CACHED),
    ("experts triton", "blocks differ from shape to shape by how far they were tuned: one law"),
    ("experts trtllm", "tokens spread by a power law are priced as if evenly"),
    ("experts wgrad, Transformer Engine", "sums of 32 bits, expert after expert: no constants"),
    ("gb200 norm", _CACHED),
    ("h200-sxm norm", _CACHED),
    ("relu_squared forward, eager", "rows of a million elements, bound by the launch"),
    ("embedding forward, eager", _FLOAT32),
    ("rms_norm forward, eager", _FLOAT32),
    ("layer_norm forward, eager", _FLOAT32),
    ("layer_norm backward, eager", _FLOAT32),
    ("cross_entropy forward, eager", _SOFTMAX),
    ("product bfloat16 from", _SHEET),
    ("product fp8 > 100 GFLOP", "vLLM's and SGLang's kernels are not cuBLAS's; one law for both"),
)
"""Pairs of a part of a row's name and the cause of its miss."""


def with_causes(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, with the known cause as the note of each miss that has no note yet."""
    return [row if row.ok or row.note else replace(row, note=_cause(row)) for row in rows]


def _cause(row: Row) -> str:
    return next((cause for part, cause in CAUSES if part in row.name), "")
