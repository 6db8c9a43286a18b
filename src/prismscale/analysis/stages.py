"""Pipeline stages as reports show them; :mod:`prismscale.graph.pipeline` assigns ranks to them."""

from __future__ import annotations

from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.pipeline import stage_of


def classes_by_stage(graph: JobGraph) -> dict[int | None, list[RankClass]]:
    """Group classes by stage, ascending; one entry ``None`` where there is no pipeline."""
    found: dict[int | None, list[RankClass]] = {}
    for rank_class in graph.classes:
        found.setdefault(stage_of(rank_class), []).append(rank_class)
    return dict(sorted(found.items(), key=lambda pair: -1 if pair[0] is None else pair[0]))


def stage_name(stage: int | None) -> str:
    """Return ``stage 3``, or ``all ranks`` for None."""
    return "all ranks" if stage is None else f"stage {stage}"


def shown_ranks(graph: JobGraph) -> tuple[int, ...]:
    """Return the first rank of each stage, which a timeline shows by default."""
    return tuple(
        int(min(c.members_M[0] for c in classes)) for classes in classes_by_stage(graph).values()
    )
