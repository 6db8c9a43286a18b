"""Pipeline stages as a report shows them; :mod:`prismscale.graph.pipeline` says which is whose."""

from __future__ import annotations

from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.pipeline import stage_of


def classes_by_stage(graph: JobGraph) -> dict[int | None, list[RankClass]]:
    """Classes of each stage, stages ascending; one entry ``None`` where there is no pipeline."""
    found: dict[int | None, list[RankClass]] = {}
    for rank_class in graph.classes:
        found.setdefault(stage_of(rank_class), []).append(rank_class)
    return dict(sorted(found.items(), key=lambda pair: -1 if pair[0] is None else pair[0]))


def stage_name(stage: int | None) -> str:
    """``stage 3``, or ``all ranks``."""
    return "all ranks" if stage is None else f"stage {stage}"


def shown_ranks(graph: JobGraph) -> tuple[int, ...]:
    """The first rank of each stage: who stands on a timeline when nobody was asked for."""
    return tuple(
        int(min(c.members_M[0] for c in classes)) for classes in classes_by_stage(graph).values()
    )
