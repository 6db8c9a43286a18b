"""A rule: which communications it applies to, and what absent peers contribute to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from prismscale.emulation.hook import Collective
from prismscale.errors import UsageError, did_you_mean
from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import KIND, kind_of

OBJECT_OPS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
TENSOR_OPS = tuple(
    op.spelling
    for op in CollectiveOp
    if op not in (CollectiveOp.SEND, CollectiveOp.BARRIER)  # nothing arrives
)
REDUCTIONS = {
    "sum": KIND.SUM,
    "avg": KIND.AVG,
    "product": KIND.PRODUCT,
    "min": KIND.MIN,
    "max": KIND.MAX,
    "band": KIND.BAND,
    "bor": KIND.BOR,
    "bxor": KIND.BXOR,
}
ATTRIBUTE = "__payload_rule__"
"""Attribute of a function that holds the rule which the decorator made of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """The argument of a rule's function. Tensors are the program's own: read them, write none."""

    op: str
    """As torch spells it: ``broadcast``, ``all_reduce``, …, ``broadcast_object_list``."""
    group: str
    """The program's name for the group, for example ``mesh_tp``; may be empty."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in group order."""
    group_rank: int
    """This rank's position in :attr:`ranks`."""
    root: int = -1
    """Group rank of the root or the sender; -1 if there is none."""
    site: str = ""
    """``file:line`` of the program's call."""
    number: int = 0
    """Number of communications that the rule has answered on this rank before."""
    inputs: tuple[torch.Tensor, ...] = ()
    """What this rank contributes."""
    outputs: tuple[torch.Tensor, ...] = ()
    """Tensors to define; they still hold whatever the program left there."""
    objects: tuple[Any, ...] = ()
    """The objects that this rank passed to an object collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Which communications a rule applies to: those that fit everything that is given.

    Raises :class:`UsageError` for an operation, dtype or reduction that does not exist.
    """

    op: tuple[str, ...] = ()
    """One of these operations."""
    group: str = ""
    """The group's name, with or without its ``mesh_``; ``*`` and ``?`` match as in file names."""
    site: str = ""
    """The end of the path of the calling file, with or without ``:line``; ``*`` and ``?`` match as
    in file names."""
    dtype: tuple[str, ...] = ()
    """Every arriving tensor has one of these dtypes, for example ``int64``."""
    numel: int = 0
    """Number of elements of each tensor that arrives; 0: any number."""
    max_numel: int = 0
    """Most elements of each tensor that arrives; 0: any number."""
    reduce: str = ""
    """How contributions are reduced: ``sum``, ``max``, …"""

    def __post_init__(self) -> None:
        for op in self.op:
            if op not in (*TENSOR_OPS, *OBJECT_OPS):
                hint = did_you_mean(op, (*TENSOR_OPS, *OBJECT_OPS))
                raise UsageError(
                    f"op {op!r} is no communication in which something arrives; {hint}"
                )
        for name in self.dtype:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise UsageError(f"dtype {name!r} is none of torch's; give for example int64")
        if self.reduce and self.reduce not in REDUCTIONS:
            raise UsageError(f"reduce {self.reduce!r}; {did_you_mean(self.reduce, REDUCTIONS)}")
        if self.numel < 0 or self.max_numel < 0:
            raise UsageError("numel and max_numel are numbers of elements: give 1 or more")

    def covers(self, collective: Collective) -> bool:
        """Return whether everything fits but the call site, which takes longest to find."""
        arriving = collective.outputs or collective.inputs
        return (
            self.covers_call(collective.op.spelling, collective.group.name)
            and not (self.dtype and any(_name(t.dtype) not in self.dtype for t in arriving))
            and not (self.numel and any(t.numel() != self.numel for t in arriving))
            and not (self.max_numel and any(t.numel() > self.max_numel for t in arriving))
            and not (self.reduce and kind_of(collective.reduce_op) != REDUCTIONS[self.reduce])
        )

    def covers_call(self, op: str, group: str) -> bool:
        """Return whether operation and group fit. No :attr:`op` means all operations on tensors."""
        if op not in self.op if self.op else op in OBJECT_OPS:
            return False
        names = (group, group.removeprefix("mesh_"))
        return not self.group or any(fnmatchcase(name, self.group) for name in names)

    def covers_site(self, site: str) -> bool:
        """Return whether the call site ``file:line`` fits."""
        if not self.site:
            return True
        path, _, line = site.rpartition(":")
        named, _, wanted = self.site.rpartition(":")
        if not named or not wanted.isdigit():
            named, wanted = self.site, ""
        at_end = fnmatchcase(path, named) or fnmatchcase(path, f"*/{named}")
        return at_end and wanted in ("", line)


Contribute = Callable[[Communication, int], Any]
"""Returns what the member of a group rank contributes: a number, tensors or objects; None if the
rule says nothing about this communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What absent peers contribute to the communications that fit :attr:`match`."""

    name: str
    """Unique among the rules of a job."""
    where: str
    """``file:line`` of its definition; for TOML, the file's name."""
    match: Match
    contribute: Contribute
    is_recorded: bool = False
    """Only a recorded value is accepted; :attr:`contribute` is never called."""
    is_per_peer: bool = True
    """Whether absent peers contribute different values."""

    def __str__(self) -> str:
        return f"'{self.name}' ({self.where})"


def payload_rule(
    *,
    op: str | Sequence[str] = (),
    group: str = "",
    site: str = "",
    dtype: str | Sequence[str] = (),
    numel: int = 0,
    max_numel: int = 0,
    reduce: str = "",
    name: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function in the file of ``prismscale run --rules`` a payload rule.

    The function takes a :class:`Communication` and returns what each absent peer contributes to it:
    a number for all elements, or a tensor with as many elements (one for each, where several
    tensors are sent); for object collectives, the list of objects. A function with a second
    parameter is called for each peer and gets the peer's group rank. None leaves the communication
    to other sources.

    Args:
        op: operations that the rule applies to, in torch's spelling; none: all that carry tensors.
        group: name of the group, ``tp`` or ``mesh_tp``; ``*`` and ``?`` match as in file names.
        site: end of the path of the calling line: ``data.py``, ``data.py:120``.
        dtype: dtype of the tensors, ``int64`` for example.
        numel: elements of each tensor; 0: any number.
        max_numel: most elements of each tensor; 0: any number.
        reduce: how contributions are reduced, ``max`` for example.
        name: name for errors and the report; empty: the function's name.

    Raises:
        UsageError: an operation, dtype or reduction that does not exist, or a function that takes
            neither one nor two arguments.
    """
    match = Match(
        op=_several(op),
        group=group,
        site=site,
        dtype=_several(dtype),
        numel=numel,
        max_numel=max_numel,
        reduce=reduce,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        code = function.__code__
        n_parameters = len(inspect.signature(function).parameters)
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        if n_parameters not in (1, 2):
            raise UsageError(
                f"{where}: rule {function.__name__!r} takes {n_parameters} arguments; it is given "
                "(communication), or (communication, peer) to be asked for each peer"
            )
        per_peer = n_parameters == 2
        rule = Rule(
            name=name or function.__name__,
            where=where,
            match=match,
            contribute=function if per_peer else lambda told, peer: function(told),
            is_per_peer=per_peer,
        )
        setattr(function, ATTRIBUTE, rule)
        return function

    return decorate


def _several(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
