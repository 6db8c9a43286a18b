"""What-ifs on a live rank: some communications block its computation, and some are left out."""

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
    """Orders the stream on which a program computes and the one to which it issues work now."""

    def before(self) -> None:
        """Let work issued now begin after the computing stream's work so far."""
        ...

    def after(self) -> None:
        """Let later work of the computing stream begin after what was issued."""
        ...


class OneStream:
    """The only stream of a CPU, which computes and communicates in order."""

    def before(self) -> None:
        """Do nothing: the order is there already."""

    def after(self) -> None:
        """Do nothing: the order is there already."""


@dataclass(kw_only=True)
class HopedHook:
    """Answers a live rank's communications under what-ifs (a CommunicationHook)."""

    answering: CommunicationHook
    payload: PayloadSource
    hoped: WhatIfs
    stream: ComputingStream
    leaves_out: bool = False
    """True while the program does work that the what-ifs leave out."""

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Answer the batch; wait for it at once if its group blocks computation.

        A batch that is left out is filled here, and nobody else hears of it.
        """
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
    """Makes the recomputation of a steady step cost nothing (a RecomputationListener)."""

    hook: HopedHook
    is_steady: Callable[[], bool]
    """Whether steady steps have begun. Earlier steps stay as they were captured."""
    without_cost: Callable[[int], None]
    """Called with 1 to make this thread's work cost nothing, and with 0 to end that."""

    def recomputation_begins(self) -> None:
        """Leave out what follows, if the step is steady."""
        if self.is_steady():
            self.hook.leaves_out = True
            self.without_cost(1)

    def recomputation_ended(self) -> None:
        """Stop leaving out."""
        if self.hook.leaves_out:
            self.hook.leaves_out = False
            self.without_cost(0)


@dataclass(kw_only=True)
class Phases:
    """Makes the phases of a program on a CPU as long as the what-ifs say (a BackwardListener)."""

    hook: LiveHook
    hoped: WhatIfs

    def __post_init__(self) -> None:
        self._now(FORWARD)

    def backward_begins(self) -> None:
        """Enter the backward phase, called as in captures."""
        self._now(BACKWARD)

    def backward_ended(self) -> None:
        """Return to the forward phase."""
        self._now(FORWARD)

    def optimizer_begins(self) -> None:
        """Enter the optimizer phase."""
        self._now(OPTIMIZER)

    def optimizer_ended(self) -> None:
        """Return to the forward phase."""
        self._now(FORWARD)

    def _now(self, phase: str) -> None:
        self.hook.enter_phase(self.hoped.factor_of(phase))
