"""Schedules the ranks of a job that runs with real values, by answering their questions.

Each thread of a rank that communicates has its own connection and asks one question at a time. A
rank is suspended by not yet answering its question. Questions are JSON, one per line. The table
shows each question, its content, and its answer:

=========== ============================== ==================================================
``issue``   parts of communications, step  names whose result this rank has to compute
``reduced`` names                          empty, at once
``wait``    names                          sent when all are complete and the rank has a slot
``poll``    names                          whether all are complete: at once if they are, else when
                                           no other rank can go on
``take``    names                          names whose stored values no rank needs any more
``pressed`` memory that the rank holds now none: its memory is written out and it goes on waiting
``store``   an operation on a store        its result, as soon as there is one
=========== ============================== ==================================================

With a memory budget, a rank reports its memory with its questions. A suspended rank may be asked to
write its memory out to disk (to *press it out*) before it gets its answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prismscale.errors import StuckError
from prismscale.graph.node import CollectiveOp
from prismscale.switching.memory_budget import MemoryBudget
from prismscale.switching.operations import IssuedPart, OperationTable
from prismscale.switching.shared_keys import Keys
from prismscale.switching.slots import RankState, Slots

MOST_TOLD = 12
"""Maximum number of waits that the explanation of a deadlock lists."""
Answer = Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class Wait:
    """A question of a rank that is not answered yet."""

    answer: Answer
    names: tuple[str, ...] = ()
    """Communications that must be complete before the answer."""
    key: tuple[str, str, str] | None = None
    """For a store question: the operation, the store, and the key that must exist; else None."""
    value: str = ""
    is_poll: bool = False
    """Whether the rank asks if :attr:`names` are complete, instead of waiting until they are."""


@dataclass(kw_only=True)
class SwitchingCoordinator:
    """Holds the ranks, their slots and their communications, and answers questions."""

    world_size: int
    slots: Slots = field(init=False)
    operations: OperationTable = field(init=False)
    n_slots: int
    start: Callable[[int], None]
    """Starts the process of a rank."""
    budget: MemoryBudget | None = None
    """Memory budget of all ranks together; None: unlimited."""
    patience_s: float = 0.0
    """Time without a question after which ranks that all wait are stuck. Another thread of theirs
    may still compute, and ask for what they wait for."""
    is_stopping: bool = False
    """Whether a rank has run all wanted steps. Ranks that wait for ended ones may then end too."""

    def __post_init__(self) -> None:
        self.operations = OperationTable(self.world_size)
        self.slots = Slots(
            self.world_size, self.n_slots, missing=self._missing, pending=self.operations.pending
        )
        self._waits: dict[int, list[Wait]] = {}
        self._heard = time.monotonic()
        self._steps = [0] * self.world_size
        self._stores: dict[str, Keys] = {}
        self._entering: list[tuple[int, RankState]] = []
        """Ranks that have a slot and go on as soon as there is memory."""
        self._polled: set[int] = set()
        """Ranks among :attr:`_entering` whose poll is answered although it is not complete."""

    def asked(self, rank: int, question: Mapping[str, Any], answer: Answer) -> None:
        """Answer a question, at once or later."""
        kind = question["ask"]
        self._heard = time.monotonic()
        if self.budget is not None and "held" in question:
            self.budget.told(rank, question["held"], question.get("base"))
        if kind == "issue":
            self._steps[rank] = question.get("step", 0)
            parts = [_part(rank, told) for told in question["parts"]]
            answer({"reduce": [p.name for p in parts if self.operations.issue(p)]})
        elif kind == "reduced":
            for name in question["names"]:
                self.operations.reduced(name)
            answer({})
        elif kind == "take":
            names = question["names"]
            answer({"free": [n for n in names if self.operations.take(n, rank)]})
        elif kind == "wait":
            self._wait(rank, Wait(answer=answer, names=tuple(question["names"])))
        elif kind == "pressed":
            if self.budget is not None:
                self.budget.pressed(rank, question["base"])
        elif kind == "poll":
            self._wait(rank, Wait(answer=answer, names=tuple(question["names"]), is_poll=True))
        else:
            self._store(rank, question, answer)

    def ended(self, rank: int, *, stopped: bool) -> None:
        """Note that a rank's process has ended well; ``stopped``: after all wanted steps."""
        self.is_stopping |= stopped
        self._waits.pop(rank, None)
        # Its main thread may end while another thread still waits for the rank's memory.
        self._entering = [found for found in self._entering if found[0] != rank]
        self._polled.discard(rank)
        self.slots.ended(rank)
        if self.budget is not None:
            self.budget.ended(rank)

    def advance(self) -> None:
        """Let all ranks go on that can.

        Raises:
            StuckError: some ranks can never go on.
        """
        self._go_on()
        if not self.slots.is_stuck():
            return
        if self.is_stopping:
            self._stop_all()
        elif (polling := self._polling()) is not None:
            # It takes its memory again, as any rank that goes on.
            self._entering.append((polling, self.slots.states[polling]))
            self._polled.add(polling)
            self.slots.go(polling)
            self._enter()
        elif time.monotonic() - self._heard >= self.patience_s:
            raise StuckError(self._why_stuck())

    def _go_on(self) -> None:
        self._answer_running()
        self._enter()
        while (found := self.slots.next()) is not None:
            self._entering.append(found)
            self._enter()

    def _answer_running(self) -> None:
        """Answer what is ready of ranks of which another thread runs."""
        entering = {rank for rank, _ in self._entering}
        for rank, waits in self._waits.items():
            is_running = self.slots.states[rank] is RankState.RUNNING and rank not in entering
            if waits and is_running:
                self._answer(rank)

    def _enter(self) -> None:
        """Let ranks with a slot go on, in order, as long as there is memory."""
        while self._entering and self._has_memory(self._entering[0][0]):
            rank, before = self._entering.pop(0)
            if before is RankState.NEW:
                self.start(rank)
                continue
            self._answer(rank)
            if rank in self._polled:
                self._polled.discard(rank)
                self._answer_poll(rank)

    def _has_memory(self, rank: int) -> bool:
        if self.budget is None:
            return True
        states = enumerate(self.slots.states)
        suspended = [r for r, s in states if s is RankState.SUSPENDED and self._waits.get(r)]
        # The rank for which the fewest communications wait is written out first.
        suspended.sort(key=lambda r: (self.operations.pending(r), -r))
        leaving = self.budget.enter(rank, suspended)
        for other in leaving or ():
            self._waits[other][0].answer({"press": True})
        return leaving is None

    def running(self) -> int:
        """Return the number of ranks that have not ended."""
        return sum(s is not RankState.ENDED for s in self.slots.states)

    def progress(self) -> tuple[int, str]:
        """Return the steps of all ranks together, and a note with the number of ranks per state.

        Ranks report their step whenever they communicate.
        """
        counts = Counter(self.slots.states)
        told = ", ".join(f"{counts[state]} {state.value}" for state in RankState if counts[state])
        return sum(self._steps), f"ranks: {told}"

    def _wait(self, rank: int, wait: Wait) -> None:
        self._waits.setdefault(rank, []).append(wait)
        if self.slots.states[rank] is RankState.RUNNING and self._is_ready(rank, wait):
            self._answer(rank)
        else:
            self.slots.waits(rank)

    def _answer(self, rank: int) -> None:
        """Answer all questions of a running rank that are ready."""
        for wait in [w for w in self._waits[rank] if self._is_ready(rank, w)]:
            self._waits[rank].remove(wait)
            if wait.key is not None:
                wait.answer({"value": self._perform(*wait.key, wait.value)})
            else:
                wait.answer({"complete": True})

    def _polling(self) -> int | None:
        """Return the rank that has polled longest and may go on with the answer "not complete"."""
        for rank, waits in self._waits.items():
            if any(wait.is_poll for wait in waits):
                return rank
        return None

    def _answer_poll(self, rank: int) -> None:
        # The rank moves behind all others, so that polling ranks take turns.
        waits = self._waits.pop(rank)
        # There is none if it became complete while the rank had to wait for its memory.
        poll = next((wait for wait in waits if wait.is_poll), None)
        self._waits[rank] = [wait for wait in waits if wait is not poll]
        if poll is not None:
            poll.answer({"complete": False})

    def _stop_all(self) -> None:
        for rank, waits in self._waits.items():
            for wait in waits:
                wait.answer({"stop": True})
            self.slots.states[rank] = RankState.RUNNING
        self._waits.clear()

    def _is_ready(self, rank: int, wait: Wait) -> bool:
        if wait.key is not None:
            return self._is_there(*wait.key)
        return not any(self.operations.missing(name, rank) for name in wait.names)

    def _missing(self, rank: int) -> Iterator[int]:
        """Yield the ranks that a waiting rank waits for.

        There are none as soon as one of its threads can go on. A store's key may come from any rank
        that has not ended.
        """
        waits = self._waits.get(rank, [])
        if any(self._is_ready(rank, wait) for wait in waits):
            return
        for wait in waits:
            if wait.key is None:
                for name in wait.names:
                    yield from self.operations.missing(name, rank)
            else:
                states = enumerate(self.slots.states)
                yield from (r for r, s in states if s is not RankState.ENDED and r != rank)
                # Itself, so that the rank is not ready even if all others have ended.
                yield rank

    def _store(self, rank: int, question: Mapping[str, Any], answer: Answer) -> None:
        do, store, key = question["do"], question["store"], question["key"]
        if do in ("read", "pop") and not self._is_there(do, store, key):
            self._wait(rank, Wait(answer=answer, key=(do, store, key)))
        else:
            answer({"value": self._perform(do, store, key, question.get("value", ""))})

    def _is_there(self, do: str, store: str, key: str) -> bool:
        keys = self._keys(store)
        return keys.has_queued(key) if do == "pop" else keys.has(key)

    def _keys(self, store: str) -> Keys:
        return self._stores.setdefault(store, Keys())

    def _perform(self, do: str, store: str, key: str, value: Any) -> Any:
        keys = self._keys(store)
        if do == "read":
            return keys.read(key).decode("latin-1")
        if do == "pop":
            return keys.pop(key).decode("latin-1")
        if do == "write":
            return keys.write(key, value.encode("latin-1"))
        if do == "extend":
            return keys.extend(key, value.encode("latin-1"))
        if do == "push":
            return keys.push(key, value.encode("latin-1"))
        if do == "add":
            return keys.add(key, int(value))
        if do == "compare_set":
            expected, desired = (v.encode("latin-1") for v in value)
            return keys.compare_set(key, expected, desired).decode("latin-1")
        asked: dict[str, Callable[[str], Any]] = {
            "has": keys.has,
            "remove": keys.remove,
            "queued": keys.queued,
            "names": lambda _: keys.names(),
        }
        return asked[do](key)

    def _why_stuck(self) -> str:
        lines = []
        for rank, waits in sorted(self._waits.items()):
            for wait in waits:
                lines.append(f"  rank {rank} waits for {self._waited_for(rank, wait)}")
        shown, left = lines[:MOST_TOLD], len(lines) - MOST_TOLD
        more = [f"  … and {left} more waits"] if left > 0 else []
        ended = [r for r, s in enumerate(self.slots.states) if s is RankState.ENDED]
        head = "the program's ranks wait for each other, and none can go on:"
        who = f" (ended: {_ranks(ended)})" if ended else ""
        return "\n".join([f"{head}{who}", *shown, *more])

    def _waited_for(self, rank: int, wait: Wait) -> str:
        if wait.key is not None:
            return f"the store's key {wait.key[2]!r}, which no rank has written"
        name = next(n for n in wait.names if self.operations.missing(n, rank))
        missing = self.operations.missing(name, rank)
        others = [self._instead(other) for other in missing[:2]]
        told = f"; {'; '.join(filter(None, others))}" if any(others) else ""
        part = self.operations.part(name, rank)
        return f"{part.title}: not issued by {_ranks(missing)}{told}"

    def _instead(self, rank: int) -> str:
        if self.slots.states[rank] is RankState.ENDED:
            return f"rank {rank} has ended"
        for wait in self._waits.get(rank, []):
            if wait.names:
                return f"rank {rank} is at {self.operations.part(wait.names[0], rank).site}"
        return ""


def _part(rank: int, told: Mapping[str, Any]) -> IssuedPart:
    fields = {**told, "op": CollectiveOp(told["op"]), "members": tuple(told["members"])}
    return IssuedPart(rank=rank, **fields)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {shown}{f' and {len(ranks) - 6} more' if len(ranks) > 6 else ''}"
