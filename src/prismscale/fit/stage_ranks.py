"""Choice of the ranks to capture, so that every kind of pipeline stage is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prismscale.capture.plan import axes_of_messages, find_axes, rank_at
from prismscale.graph.pipeline import pipeline_groups
from prismscale.graph.trace import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Ranks along a mesh axis on which rank 0 sends or receives, rank 0 first."""

    ranks: tuple[int, ...]
    is_pipeline: bool
    """Whether the ranks are pipeline stages. Otherwise they share the tokens of a sequence."""


def columns_of(trace: RankTrace) -> list[Column]:
    """Return the columns of rank 0, found from its sends and receives in its ``trace``."""
    axes = find_axes(trace)
    in_pipelines = {rank for g in pipeline_groups(trace) for rank in trace.groups[g].ranks}
    columns = []
    for number in axes_of_messages(trace, axes):
        places = (
            tuple(position if a == number else 0 for a in range(len(axes)))
            for position in range(axes[number].size)
        )
        ranks = tuple(rank_at(axes, place) for place in places)
        columns.append(Column(ranks=ranks, is_pipeline=set(ranks) <= in_pipelines))
    return columns


def end_stages(first_message: RankTrace) -> list[int]:
    """Return the ranks that are captured in any case, besides rank 0.

    The last stage comes first, because it may hold the logits and take longest."""
    columns = [column.ranks for column in columns_of(first_message)]
    return [ranks[p] for ranks in columns for p in reversed(_end_positions(len(ranks))) if p]


def _end_positions(n_stages: int) -> list[int]:
    """Return the positions of the first two stages and the last two."""
    last = n_stages - 1
    return sorted({0, min(1, last), max(last - 1, 0), last})


def captured_positions(
    n_stages: int,
    capture: Callable[[Sequence[int]], None],
    parameter_bytes: Callable[[int], int],
) -> list[int]:
    """Capture the first two stages and the last two, then stages between that may be fuller.

    A later stage has no more microbatches in flight than an earlier one. Stages between two
    captured stages are therefore assumed to be no fuller than the first of the two, unless the
    second holds more parameters. Then the middle stage is captured too, and so on.

    Returns:
        The positions of all captured stages, in order.
    """
    known = _end_positions(n_stages)
    capture(known)
    gaps = [(1, n_stages - 2)]
    while gaps := [
        (a, b) for a, b in gaps if b - a > 1 and parameter_bytes(a) < parameter_bytes(b)
    ]:
        middles = [(a + b) // 2 for a, b in gaps]
        capture(middles)
        known += middles
        ends = zip(gaps, middles, strict=True)
        gaps = [gap for (a, b), middle in ends for gap in ((a, middle), (middle, b))]
    return sorted(known)
