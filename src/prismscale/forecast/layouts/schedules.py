"""Pipeline schedules: in which order a stage works through its microbatches.

GPipe (Huang et al. 2019), 1F1B (PipeDream-flush; Narayanan et al. 2021, section 2.2), interleaved
1F1B (the same paper, section 2.2.2, in Megatron-LM's order), and zero-bubble ZB-H1 (Qi et al. 2023,
section 2.2: the backward is split, and weight gradients fill what would be a bubble).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from prismscale.errors import UsageError, did_you_mean


class Work(Enum):
    """What is done with one microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Whole backward; with :attr:`WEIGHT` in the schedule, only the gradient of the input."""
    WEIGHT = "weight"
    """Gradient of the weights: nobody else waits for it."""


class Action(NamedTuple):
    """One piece of work of one stage."""

    work: Work
    microbatch: int
    chunk: int = 0
    """Which of the stage's model chunks (interleaved schedules)."""


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def schedule(
    name: str, *, stage: int, stages: int, microbatches: int, chunks: int = 1
) -> list[Action]:
    """The actions of ``stage`` in order.

    Args:
        name: one of :data:`SCHEDULES`.
        stage: this stage, from 0.
        stages: pipeline stages in all.
        microbatches: of one step.
        chunks: model chunks a stage holds; more than 1 only for ``interleaved``.

    Raises:
        UsageError: an unknown name, or numbers that the schedule cannot use.
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule '{name}'; {did_you_mean(name, SCHEDULES)}")
    if microbatches < 1 or not 0 <= stage < stages:
        raise UsageError(f"stage {stage} of {stages} with {microbatches} microbatches")
    if name == "interleaved":
        return _interleaved(stage, stages, microbatches, chunks)
    if chunks != 1:
        raise UsageError(f"schedule {name} holds 1 chunk a stage, not {chunks}; use interleaved")
    if name == "gpipe":
        return _gpipe(microbatches)
    if name == "1f1b":
        return _one_f_one_b(stage, stages, microbatches)
    return _zero_bubble(stage, stages, microbatches)


def in_flight(actions: list[Action]) -> int:
    """Most (microbatch, chunk) activations that a stage holds at once: forward done, backward
    not."""
    held = most = 0
    for action in actions:
        held += {Work.FORWARD: 1, Work.BACKWARD: -1, Work.WEIGHT: 0}[action.work]
        most = max(most, held)
    return most


def _gpipe(microbatches: int) -> list[Action]:
    every = range(microbatches)
    forward = [Action(Work.FORWARD, m) for m in every]
    return forward + [Action(Work.BACKWARD, m) for m in every]


def _one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Action]:
    warm_up = min(stages - 1 - stage, microbatches)
    actions = [Action(Work.FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        actions.append(Action(Work.FORWARD, m))
        actions.append(Action(Work.BACKWARD, m - warm_up))
    first_left = microbatches - warm_up
    return actions + [Action(Work.BACKWARD, m) for m in range(first_left, microbatches)]


def _zero_bubble(stage: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B whose weight gradients follow ``stage`` microbatches behind: the later a stage, the
    longer the others wait for its input gradients, so the longer its own weights can wait."""
    actions: list[Action] = []
    for action in _one_f_one_b(stage, stages, microbatches):
        actions.append(action)
        if action.work is Work.BACKWARD and action.microbatch >= stage:
            actions.append(Action(Work.WEIGHT, action.microbatch - stage))
    left = range(max(microbatches - stage, 0), microbatches)
    return actions + [Action(Work.WEIGHT, m) for m in left]


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    if chunks < 2:
        raise UsageError("schedule interleaved needs at least 2 chunks a stage")
    if microbatches % stages:
        raise UsageError(
            f"schedule interleaved needs microbatches ({microbatches}) in multiples of the stages "
            f"({stages})"
        )
    total = microbatches * chunks
    warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def place(k: int) -> tuple[int, int]:
        """Microbatch and chunk of the k-th pass: ``stages`` microbatches through each chunk."""
        lap, within = divmod(k, stages * chunks)
        return lap * stages + within % stages, within // stages

    def forward(k: int) -> Action:
        return Action(Work.FORWARD, *place(k))

    def backward(k: int) -> Action:
        microbatch, chunk = place(k)
        return Action(Work.BACKWARD, microbatch, chunks - 1 - chunk)

    actions = [forward(k) for k in range(warm_up)]
    for k in range(warm_up, total):
        actions += [forward(k), backward(k - warm_up)]
    return actions + [backward(k) for k in range(total - warm_up, total)]
