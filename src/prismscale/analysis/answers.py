"""Answers a training engineer's questions from a run's figures.

Does the job fit, how fast is it, how well does it use the GPUs, is communication hidden, what does
it cost?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prismscale.analysis.attribution import Breakdown
from prismscale.analysis.result import RunResult
from prismscale.analysis.step_error import ErrorBar, step_error
from prismscale.analysis.wanted import Wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFit:
    """Memory of the fullest GPU, and whether it suffices."""

    capacity_bytes: int
    reserved_bytes: int
    """Most bytes that torch's allocator holds."""
    allocated_bytes: int
    """Most bytes of it that tensors hold."""
    outside_bytes: int
    """Memory outside torch's allocator: the CUDA context, NCCL."""
    stage: str
    rank: int
    """The captured rank whose GPU is fullest."""
    ran_out: bool = False
    """Whether the program ran out of memory. The figures are then those on a GPU with more."""

    @property
    def held_bytes(self) -> int:
        """Reserved bytes and those outside torch's allocator."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def headroom_bytes(self) -> int:
        """Capacity that is left; negative where the job does not fit."""
        return self.capacity_bytes - self.held_bytes

    @property
    def fits(self) -> bool:
        """Whether the job fits."""
        return self.headroom_bytes >= 0 and not self.ran_out

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the fields, and the properties derived from them."""
        more = {"held_bytes": self.held_bytes, "headroom_bytes": self.headroom_bytes}
        return asdict(self) | more | {"fits": self.fits}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTime:
    """Communication of one process group, over all ranks."""

    name: str
    exposed: float
    """Share of the step that is exposed communication."""
    hidden: float | None
    """Share of the data movement time that computation hides; None where no data moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers for one run. Unknown values are None."""

    fit: MemoryFit | None
    step_ns: int
    """The median step, which tokens per second and utilisation are computed from."""
    without_variation_ns: int
    """The step without variation, which shares of the step refer to."""
    step_error: ErrorBar | None
    """Relative to the step; None where the step is not modelled."""
    p95_ns: int | None
    """None where no steps were drawn; :attr:`step_ns` is then the median of simulated steps."""
    tokens_per_step: int | None
    tokens_given: bool
    tokens_per_s: float | None
    """Tokens per second of the whole job."""
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    """Model FLOPs utilisation, 0 … 1, without the operations that attention masks leave out. This
    is Megatron-LM's count."""
    mfu_unmasked: float | None
    """The same with those operations. This is torchtitan's count."""
    hfu: float | None
    """Hardware FLOPs utilisation, which also counts recomputation."""
    groups: tuple[GroupTime, ...]
    """Most exposed first."""
    host: float
    """Share of the step in which devices wait for the host, over all ranks; 0 where computation was
    measured."""
    bubble: float
    """Share of the step in which ranks wait for pipeline neighbours, over all ranks."""
    for_steps: int
    gpu_hours: float
    """GPU-hours of :attr:`for_steps` steps, at the mean step."""
    cost: float | None
    currency: str


def answers(result: RunResult, asked: Wanted | None = None) -> Answers:
    """Compute the answers for a run that does not hang; ``asked`` is by default the run's own."""
    asked = asked or result.wanted
    second = result.median_ns / 1e9
    tokens = asked.tokens_per_step or result.work.tokens
    per_s = tokens / second if tokens and second else None
    hours = _mean_step_ns(result) / 1e9 * asked.for_steps * result.world_size / 3600
    spread = result.spread
    return Answers(
        fit=fit_of(result),
        step_ns=result.median_ns,
        without_variation_ns=result.step_ns,
        step_error=step_error(result),
        p95_ns=spread.p95_ns if spread else None,
        tokens_per_step=tokens or None,
        tokens_given=bool(asked.tokens_per_step),
        tokens_per_s=per_s,
        tokens_per_s_per_gpu=per_s / result.world_size if per_s else None,
        mfu=utilisation(result, result.work.flops, result.median_ns),
        mfu_unmasked=utilisation(result, result.work.unmasked_flops, result.median_ns),
        hfu=utilisation(result, result.work.executed_flops, result.median_ns),
        groups=group_times(result),
        host=host_of(result),
        bubble=bubble_of(result),
        for_steps=asked.for_steps,
        gpu_hours=hours,
        cost=hours * asked.price.per_hour if asked.price else None,
        currency=asked.price.currency if asked.price else "",
    )


def utilisation(result: RunResult, flops: float, step_ns: int) -> float | None:
    """Divide ``flops`` by what all GPUs can do in ``step_ns``; None where either is unknown."""
    possible = result.peak_flops * result.world_size * step_ns / 1e9
    return flops / possible if flops and possible else None


def fit_of(result: RunResult) -> MemoryFit | None:
    """Return the fit in memory; None where memory was not tracked or the target is no GPU."""
    fullest = result.fullest
    if fullest is None or fullest.reserved_bytes is None or not result.capacity_bytes:
        return None
    return MemoryFit(
        capacity_bytes=result.capacity_bytes,
        reserved_bytes=fullest.reserved_bytes,
        allocated_bytes=fullest.peak_bytes or 0,
        outside_bytes=fullest.outside_bytes,
        stage=fullest.name,
        rank=fullest.fullest_rank if fullest.fullest_rank is not None else fullest.first_rank,
    )


def group_times(result: RunResult) -> tuple[GroupTime, ...]:
    """Return communication by group, with each stage weighted by its number of ranks."""
    whole = sum(s.ranks * s.breakdown.step_ns for s in result.stages)
    exposed: dict[str, int] = {}
    moved: dict[str, int] = {}
    for stage in result.stages:
        _add(exposed, stage.breakdown.exposed_ns, stage.ranks)
        _add(moved, stage.breakdown.moved_ns, stage.ranks)
    found = [
        GroupTime(
            name=name,
            exposed=exposed.get(name, 0) / whole if whole else 0.0,
            hidden=1 - min(1.0, exposed.get(name, 0) / moved[name]) if moved.get(name) else None,
        )
        for name in dict.fromkeys([*exposed, *moved])
    ]
    return tuple(sorted(found, key=lambda g: (-g.exposed, g.name)))


def meant(groups: tuple[GroupTime, ...], name: str) -> list[GroupTime]:
    """Return the groups that a user means by ``name``.

    These are the groups of that name, or else those with that word in their name: ``dp`` also means
    ``mesh_dp``.
    """
    exact = [g for g in groups if g.name == name]
    return exact or [g for g in groups if name.lower() in re.findall(r"[a-z0-9]+", g.name.lower())]


def bubble_of(result: RunResult) -> float:
    """Return the share of the step in which ranks wait for pipeline neighbours, over all ranks."""
    return _share(result, lambda breakdown: breakdown.bubble_ns)


def host_of(result: RunResult) -> float:
    """Return the share of the step in which devices wait for host launches, over all ranks."""
    return _share(result, lambda breakdown: breakdown.host_ns)


def _share(result: RunResult, part_ns: Callable[[Breakdown], int]) -> float:
    """Return the share of the step that ``part_ns`` takes, over all ranks."""
    whole = sum(s.ranks * s.breakdown.step_ns for s in result.stages)
    return sum(s.ranks * part_ns(s.breakdown) for s in result.stages) / whole if whole else 0.0


def _add(totals: dict[str, int], more: Mapping[str, int], ranks: int) -> None:
    for name, ns in more.items():
        totals[name] = totals.get(name, 0) + ranks * ns


def _mean_step_ns(result: RunResult) -> float:
    """Return the mean step: with variation where it was drawn, and with periodic events."""
    step_ns = result.spread.mean_ns if result.spread else result.step_ns
    # Use the shares: they count events that fall into the same step as they were seen together.
    share = sum(event.share for event in result.events)
    return step_ns + result.step_ns * share / (1 - share)
