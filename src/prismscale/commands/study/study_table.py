"""PRISM's experiments on the terminal: one table for each, a column or a line for each run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from prismscale.forecast.prism_study import PrismStudy


def print_studies(console: Console, studies: Sequence[PrismStudy]) -> None:
    """All experiments, smallest job first."""
    ordered = sorted(studies, key=lambda s: s.world_size)
    console.print(f"variability profile: {ordered[0].profile}", markup=False)
    _print_growth(console, ordered)
    _print_slow(console, ordered)
    _print_classes(console, ordered)
    for study in ordered:
        _print_hot(console, study)
    _print_placements(console, ordered)


def _numbers(*heads: str) -> list[Column]:
    return [Column(head, justify="right") for head in heads]


def _print_growth(console: Console, studies: Sequence[PrismStudy]) -> None:
    """How the tail grows with the job."""
    heads = ("steady", "p5", "p50", "p95", "p50 over steady", "p95 over p50", "CV in a log")
    table = Table(Column("ranks", justify="right"), *_numbers(*heads), title="step time, ms")
    for study in studies:
        low, middle, far = (study.quantiles[q].value for q in (0.05, 0.5, 0.95))
        table.add_row(
            f"{study.world_size:,}",
            *(f"{ns / 1e6:,.1f}" for ns in (study.step_ns, low, middle, far)),
            f"{study.growth:+.2%}",
            f"{far / middle - 1:+.2%}",
            "" if study.spread is None else f"{study.spread.log.cv:.2%}",
        )
    console.print(table)


def _print_slow(console: Console, studies: Sequence[PrismStudy]) -> None:
    factors = list(studies[0].slow)
    heads = (f"> {f:g} × median" for f in factors)
    table = Table(Column("ranks", justify="right"), *_numbers(*heads), title="chance of a step")
    for study in studies:
        shares = (f"{study.slow[f].value:.2%}" for f in factors)
        table.add_row(f"{study.world_size:,}", *shares)
    console.print(table)


def _print_classes(console: Console, studies: Sequence[PrismStudy]) -> None:
    """By what the largest job gains."""
    heads = (f"{study.world_size:,} ranks" for study in studies)
    table = Table("made steady", *_numbers(*heads), title="p95 falls by")
    gains = [{a.name: a.p95_gain for a in study.classes.ablations} for study in studies]
    for name in gains[-1]:
        own = (f"{gain[name]:z.2%}" if name in gain else "" for gain in gains)
        table.add_row(name, *own)
    console.print(table)


def _print_hot(console: Console, study: PrismStudy) -> None:
    if not study.hot:
        return
    factors = sorted({h.factor for h in study.hot})
    hottest = f"p95 at × {factors[-1]:g}, ms"
    table = Table(
        "one hot node at",
        *_numbers(*(f"× {f:g}" for f in factors), hottest),
        title=f"{study.world_size:,} ranks: step without other variation",
    )
    for stage in sorted({h.stage for h in study.hot}):
        own = {h.factor: h for h in study.hot if h.stage == stage}
        far = own[factors[-1]].p95_ns
        table.add_row(
            f"stage {stage}" if stage >= 0 else "all ranks",
            *(f"{own[f].slowdown:+.1%}" for f in factors),
            "" if far is None else f"{far / 1e6:,.1f}",
        )
    console.print(table)
    if study.hot_spread is not None:
        console.print(f"the same hot node at another stage: p95 differs by {study.hot_spread:.1%}")


def _print_placements(console: Console, studies: Sequence[PrismStudy]) -> None:
    """Nodes that the profile draws."""
    heads = ("nodes", "slowest", "best, ms", "given", "worst", "p95 of best, ms", "of worst")
    table = Table(Column("ranks", justify="right"), *_numbers(*heads), title="nodes placed")
    for study in studies:
        placed = study.placement
        best_ns, far = placed.best.step_ns, {tail.name: tail.far_ns for tail in study.tails}
        table.add_row(
            f"{study.world_size:,}",
            f"{len(placed.nodes):,}",
            f"× {max(node.factor for node in placed.nodes):.3f}",
            f"{best_ns / 1e6:,.1f}",
            *(f"{p.step_ns / best_ns - 1:+.2%}" for p in (placed.given, placed.worst)),
            f"{far['best'] / 1e6:,.1f}",
            f"{far['worst'] / far['best'] - 1:+.2%}",
        )
    console.print(table)
