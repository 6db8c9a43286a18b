"""Which communications are recorded (``--record``), and where the recording lies."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from prismscale.errors import UsageError, did_you_mean
from prismscale.graph.node import CollectiveOp

EVERYTHING = "all"
_SILENT = frozenset({CollectiveOp.BARRIER, CollectiveOp.SYMM_MEM_BARRIER})
"""Communications in which nothing is said."""
_KEYS = ("group", "op", "rank", "step")
REDUCED_FOR_ALL = frozenset({CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER})
"""Reductions whose result is recorded. Only the root holds the result of a reduce."""


def recordings_of(captures: Path) -> Path:
    """Return where the recording of a job lies, beside the traces of its ranks."""
    return captures / "recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSelection:
    """One ``--record``: the communications that fit everything that is given."""

    group: str = ""
    """The group's name, with or without its ``mesh_``; ``*`` and ``?`` match as in file names."""
    op: str = ""
    ranks: tuple[range, ...] = ()
    """One of these ranks takes part; none: all ranks. For a reduction whose result every member
    gets, only these ranks' contributions are kept, beside the result."""
    steps: tuple[range, ...] = ()
    """Steps, counted from 0; step 0 ends with the first optimizer step."""

    @staticmethod
    def parse(text: str) -> RecordSelection:
        """``all``, or ``group=tp,step=3,rank=0-3,op=all_reduce`` with some of these.

        Raises:
            UsageError: an unknown key, an invalid number, or an operation that is unknown or in
                which nothing is said.
        """
        if text.strip() == EVERYTHING:
            return RecordSelection()
        given: dict[str, str] = {}
        for pair in text.split(","):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if key not in _KEYS or not equals or not value:
                hint = did_you_mean(key, (*_KEYS, EVERYTHING))
                raise UsageError(
                    f"--record {text!r}: {pair.strip()!r}; {hint}. Give for example "
                    "'group=tp,step=3', or all"
                )
            if key in given:
                raise UsageError(f"--record {text!r} names {key} twice: give --record twice")
            given[key] = value
        return RecordSelection(
            group=given.get("group", ""),
            op=_op(given.get("op", ""), text),
            ranks=_numbers(given.get("rank", ""), text),
            steps=_numbers(given.get("step", ""), text),
        )

    def covers(self, op: CollectiveOp, group: str, ranks: Iterable[int], step: int) -> bool:
        """Return whether a communication among ``ranks`` is selected."""
        names = (group, group.removeprefix("mesh_"))
        return (
            (not self.op or op.spelling == self.op)
            and (not self.group or any(fnmatchcase(name, self.group) for name in names))
            and (not self.steps or _holds(self.steps, step))
            and (not self.ranks or any(_holds(self.ranks, rank) for rank in ranks))
        )

    def keeps(self, op: CollectiveOp, rank: int) -> bool:
        """Return whether what ``rank`` gives to a covered communication is kept."""
        return op not in REDUCED_FOR_ALL or not self.ranks or _holds(self.ranks, rank)


def refuse_idle_selections(texts: Collection[str], recorded: Iterable[int]) -> None:
    """Raise for a selection that fits no communication, because it must be misspelt.

    ``recorded`` is the number of communications by selection.

    Raises:
        UsageError: a selection recorded nothing.
    """
    for text, count in zip(texts, recorded, strict=True):
        if not count:
            raise UsageError(
                f"--record {text!r} fits no communication of the job: look at the group's name "
                "(the report has it) and at how many steps there are (--samples and two more)"
            )


def _op(op: str, text: str) -> str:
    """Return the operation under which what ``op`` says is recorded."""
    if not op:
        return op
    silent = [silent.spelling for silent in _SILENT]
    told = [op.spelling for op in CollectiveOp if op not in _SILENT]
    if op not in told:
        why = "nothing is said in it; " if op in silent else ""
        raise UsageError(f"--record {text!r}: op {op!r}; {why}{did_you_mean(op, told)}")
    # A message has one name at both ends, and its sender says what is in it.
    return CollectiveOp.SEND.spelling if op == CollectiveOp.RECV.spelling else op


def _holds(ranges: tuple[range, ...], number: int) -> bool:
    return any(number in r for r in ranges)


def _numbers(value: str, text: str) -> tuple[range, ...]:
    """Parse ``3``, ``2-5``, or several of them with ``+`` in between."""
    if not value:
        return ()
    found = []
    for part in value.split("+"):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--record {text!r}: {part!r}; give a number or a range: 3, 0-7, 1+5")
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(found)
