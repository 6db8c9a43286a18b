"""What-ifs as a live rank feels them: some communications block it, and some are not made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import Work

from prismscale.durations.what_if.combined import WhatIfs
from prismscale.emulation.hook import Collective, CommunicationHook
from prismscale.emulation.step_detection import BACKWARD, FORWARD, OPTIMIZER
from prismscale.emulation.work import completed
from prismscale.live.host_hook import LiveHook
from prismscale.payload.mirror import PayloadSource


class ComputingStream(Protocol):
    """The stream that a program computes on, and the one on which it issues something now."""

    def before(self) -> None:
        """What is issued now begins after what the computing stream was given."""
        ...

    def after(self) -> None:
        """What the computing stream is given from now on begins after what was issued."""
        ...


class OneStream:
    """Of a processor: it computes where it communicates."""

    def before(self) -> None:
        """It is so."""

    def after(self) -> None:
        """It is so."""


@dataclass(kw_only=True)
class HopedHook:
    """A live rank's communications with what-ifs (a CommunicationHook)."""

    answering: CommunicationHook
    payload: PayloadSource
    hoped: WhatIfs
    stream: ComputingStream
    leaves_out: bool = False
    """What the program does now is to be done no more."""

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """As ever, but at once for whom it blocks, and without anybody where it is made no more."""
        if self.leaves_out:
            for collective in batch:
                self.payload.fill(collective)
            return completed(tuple(t for c in batch for t in c.outputs))
        group = batch[0].group
        if not self.hoped.blocks(group.name or f"group {group.group_index}"):
            return self.answering.communicate(batch)
        self.stream.before()
        work = self.answering.communicate(batch)
        work.wait()
        self.stream.after()
        return work


@dataclass(kw_only=True)
class LeftOut:
    """Lets what a steady step computes a second time cost nothing (a RecomputationListener)."""

    hook: HopedHook
    is_steady: Callable[[], bool]
    """The steps before are as they were captured."""
    without_cost: Callable[[int], None]
    """Takes 1 where it begins and 0 where it ends, on this thread."""

    def recomputation_begins(self) -> None:
        """From here …"""
        if self.is_steady():
            self.hook.leaves_out = True
            self.without_cost(1)

    def recomputation_ended(self) -> None:
        """… up to here."""
        if self.hook.leaves_out:
            self.hook.leaves_out = False
            self.without_cost(0)


@dataclass(kw_only=True)
class Phases:
    """Lets phases of a program that computes here take as long as hoped (a BackwardListener)."""

    hook: LiveHook
    hoped: WhatIfs

    def __post_init__(self) -> None:
        self._now(FORWARD)

    def backward_begins(self) -> None:
        """What follows is called backward, as in captures."""
        self._now(BACKWARD)

    def backward_ended(self) -> None:
        """Back to forward work."""
        self._now(FORWARD)

    def optimizer_begins(self) -> None:
        """What follows is the optimizer."""
        self._now(OPTIMIZER)

    def optimizer_ended(self) -> None:
        """Back to forward work."""
        self._now(FORWARD)

    def _now(self, phase: str) -> None:
        self.hook.enter_phase(self.hoped.factor_of(phase))
