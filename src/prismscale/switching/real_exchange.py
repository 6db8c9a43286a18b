"""Exchanges real values with the other ranks of a job, through files and the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prismscale.emulation.call_site import call_site
from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import InstanceIds
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.local_work import DurationCallback, LocalWork
from prismscale.payload.arithmetic import kind_of
from prismscale.payload.recordings.recording_writer import RecordingWriter
from prismscale.switching.outcomes import fill, reduced
from prismscale.switching.questions import Questions
from prismscale.switching.stored_values import RESULT, Given, StoredValues


class RealExchange:
    """Communication load with real values. It observes groups, because it needs their names."""

    interrupts = True
    """A wait ends the program's span at its beginning, because the rank may be suspended in it."""

    def __init__(
        self,
        questions: Questions,
        folder: Path,
        rank: int,
        writer: RecordingWriter | None = None,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        """Exchange values through ``folder``, which all ranks of the job share.

        ``writer`` records some of them, and ``step`` returns the current step.
        """
        self._questions, self._rank = questions, rank
        self._writer, self._step = writer, step
        self._values = StoredValues(folder)
        self._instances = InstanceIds()

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Note the group, so that its communications get the same names on all members."""
        self._instances.group_created(ranks, name, backend, group_index)

    def answers(self, collective: Collective) -> bool:
        """Always true: all members give real values."""
        return True

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """Issue this rank's part at once. The returned work takes the outputs."""
        return Shared(self, batch, self.give(batch))

    def give(self, batch: Sequence[Collective]) -> list[str]:
        """Store and issue this rank's parts. Returns the names of the communications."""
        names = [self._instances.name(c) for c in batch]
        for name, collective in zip(names, batch, strict=True):
            if _gives(collective):
                splits = collective.input_splits
                self._values.write(name, self._rank, collective.inputs, splits)
                if self._writer is not None:
                    self._writer.gave(name, collective, participants(collective), self._step())
        site = call_site()
        parts = [self._told(n, c, site) for n, c in zip(names, batch, strict=True)]
        issue = {"ask": "issue", "parts": parts, "step": self._step()}
        answer = self._questions.ask(issue)
        last = [n for n in names if n in answer["reduce"]]
        for name in last:
            self._reduce(name, batch[names.index(name)])
        if last:
            self._questions.ask({"ask": "reduced", "names": last})
        return names

    def is_complete(self, names: Sequence[str]) -> bool:
        """Whether :meth:`take` would return at once.

        If not, other ranks run before the answer: a program that polls in a loop would block them.
        """
        return bool(self._questions.ask({"ask": "poll", "names": list(names)})["complete"])

    def take(self, names: Sequence[str], batch: Sequence[Collective]) -> None:
        """Wait until the communications are complete, then fill their outputs."""
        self._questions.ask({"ask": "wait", "names": list(names)})
        for name, collective in zip(names, batch, strict=True):
            fill(collective, self._reader(name, collective), self._result(name))
        answer = self._questions.ask({"ask": "take", "names": list(names)})
        for name, collective in zip(names, batch, strict=True):
            if name in answer["free"]:
                self._values.remove(name, participants(collective))

    def _reduce(self, name: str, collective: Collective) -> None:
        read, size = self._reader(name, collective), collective.group.size
        totals = reduced(size, collective.reduce_op, read, count=len(collective.inputs))
        self._values.write(name, RESULT, totals, ())
        if self._writer is not None:
            ranks = participants(collective)
            self._writer.came_to(name, collective, ranks, self._step(), totals)

    def _reader(self, name: str, collective: Collective) -> Callable[[int], Given]:
        return lambda member: self._values.read(name, collective.group.ranks[member])

    def _result(self, name: str) -> Callable[[], Given]:
        return lambda: self._values.read(name, RESULT)

    def _told(self, name: str, collective: Collective, site: str) -> dict[str, Any]:
        is_rooted = not collective.op.is_p2p and collective.root >= 0
        return {
            "name": name,
            "op": int(collective.op),
            "members": participants(collective),
            "root": collective.group.ranks[collective.root] if is_rooted else -1,
            "n_bytes": collective.n_bytes,
            "reduction": "" if collective.reduce_op is None else str(kind_of(collective.reduce_op)),
            "group": collective.group.name,
            "site": collective.site or site,
        }


class Shared:
    """One batch in progress (a LocalWork)."""

    def __init__(
        self, exchange: RealExchange, batch: Sequence[Collective], names: list[str]
    ) -> None:
        self._exchange, self._batch, self._names = exchange, batch, names

    def begin(self) -> None:
        """Do nothing: the part was written at issue, at no cost to the program."""

    def wait(self) -> None:
        """Wait for the parts of the other ranks, then fill the outputs."""
        self._exchange.take(self._names, self._batch)

    def is_over(self) -> bool:
        """Whether the parts of the other ranks are there."""
        return self._exchange.is_complete(self._names)

    def waited(self, since_issue: bool) -> None:
        """Do nothing: no time is measured here."""


def participants(collective: Collective) -> tuple[int, ...]:
    """Return the global ranks that take part: the group in order, or sender and receiver."""
    group = collective.group
    if not collective.op.is_p2p:
        return group.ranks
    ends = (group.ranks[group.group_rank], group.ranks[collective.root])
    return ends if collective.op is CollectiveOp.SEND else ends[::-1]


def _gives(collective: Collective) -> bool:
    """Whether other ranks read this rank's inputs."""
    if collective.op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER):
        return collective.root == collective.group.group_rank
    return bool(collective.inputs)
