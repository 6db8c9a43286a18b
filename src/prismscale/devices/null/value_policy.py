"""Answers to reads of values that do not exist, and the ledger of every such answer.

What follows from constants is exact: the extension keeps a real CPU copy of small storages for as
long as only exact ops write to them. Everything else a program reads from the device is answered
from :class:`ValuePolicy` and entered in the :class:`ValueLedger` with the line that asked.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

import torch

from prismscale.analysis.emulated import ValueUse
from prismscale.devices.null.bindings import ANSWER_CALLBACK
from prismscale.emulation.call_site import line_of, users_frame
from prismscale.errors import UsageError

# With the separator: torchtitan lives beside torch.


class Question(IntEnum):
    """What the program wants to know; the numbers are those of ``csrc/policy.h``."""

    FLOAT = 0
    INTEGER = 1
    BOOLEAN = 2
    COUNT = 3
    HISTOGRAM = 4
    FOUND_INF = 5
    CHECK = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuePolicy:
    """What an unknown value is said to be.

    - ``floating``: a loss, a norm, a scale. Finite and positive, so that logs and ratios work.
    - ``integer``: a count. One rather than zero, because counts are divided by.
    - ``boolean``: a test. False ends rejection loops and finds neither NaN nor infinity.
    - ``check``: whether a test holds for all elements (``all``, ``allclose``), or two tensors are
      equal. True, because programs stop where such a check fails.
    - ``nonzero_fraction``: the share of elements that ``nonzero``, masks and ``unique`` keep.
    - ``routing``: relative load of the bins of a histogram with as many bins (tokens by expert).
    - ``routing_of_ranks``: they are loads of ranks, for histograms with a multiple of as many bins.
    - ``routing_exponent``: of all other histograms; bin ``i`` (from 1) gets a share in proportion
      to ``i ** -exponent``, with 0 all the same.

    Finiteness is not a value: ``isfinite`` is True and ``isnan``/``isinf`` False everywhere, and
    gradient unscaling finds no infinity.
    """

    floating: float = 1.0
    integer: int = 1
    boolean: bool = False
    check: bool = True
    nonzero_fraction: float = 1.0
    routing: Sequence[float] = ()
    routing_of_ranks: bool = False
    routing_exponent: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.nonzero_fraction <= 1.0:
            raise UsageError(f"nonzero_fraction is {self.nonzero_fraction}; allowed: 0 to 1")
        if any(load < 0 for load in self.routing) or (self.routing and not sum(self.routing)):
            raise UsageError("routing takes loads of at least 0 that do not sum to 0")

    def answer(self, question: Question, elements: int) -> float:
        """The answer to ``question`` about a tensor of ``elements`` elements."""
        match question:
            case Question.FLOAT:
                return self.floating
            case Question.INTEGER:
                return float(self.integer)
            case Question.BOOLEAN:
                return float(self.boolean)
            case Question.CHECK:
                return float(self.check)
            case Question.COUNT:
                return float(round(self.nonzero_fraction * elements))
            case Question.HISTOGRAM | Question.FOUND_INF:
                return 0.0


class ValueLedger:
    """Answers the extension's questions by a policy, and counts them by call site."""

    def __init__(self, library: ctypes.PyDLL, policy: ValuePolicy) -> None:
        self._library = library
        self._counts: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()
        self._here = threading.local()
        self._callback = ANSWER_CALLBACK(self._answer)  # kept: C++ holds a bare pointer to it
        library.ps_set_answer(ctypes.cast(self._callback, ctypes.c_void_p))
        self.policy = policy

    @property
    def policy(self) -> ValuePolicy:
        """The policy in force; assign another at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: ValuePolicy) -> None:
        self._policy = policy
        load = (ctypes.c_double * len(policy.routing))(*policy.routing)
        self._library.ps_set_routing(
            load, len(policy.routing), policy.routing_of_ranks, policy.routing_exponent
        )

    def uses(self) -> list[ValueUse]:
        """Every distinct use so far, most frequent first."""
        with self._lock:
            items = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return [
            ValueUse(op=op, call_site=site, answer=answer, count=count)
            for (op, site, answer), count in items
        ]

    @contextmanager
    def silent(self) -> Iterator[None]:
        """What this thread asks meanwhile is not entered: nobody reads the answers."""
        self._here.silent = True
        try:
            yield
        finally:
            self._here.silent = False

    def clear(self) -> None:
        """Forget all uses, as at the end of warm-up."""
        with self._lock:
            self._counts.clear()

    def _answer(self, op: bytes, question: int, elements: int) -> float:
        asked = Question(question)
        value = self._policy.answer(asked, elements)
        if getattr(self._here, "silent", False):
            return value
        key = (op.decode(), _call_site(_asking_frame()), self._wording(asked, value))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1
        return value

    def _wording(self, question: Question, value: float) -> str:
        match question:
            case Question.HISTOGRAM:
                return "user routing" if self._policy.routing else "uniform"
            case Question.FOUND_INF:
                return "no inf or nan"
            case Question.BOOLEAN | Question.CHECK:
                return str(bool(value))
            case Question.FLOAT:
                return str(value)
            case _:
                return str(int(value))


def _asking_frame() -> FrameType | None:
    """The frame that asked. A thread of autograd's own has none: then the main thread's, which
    waits in ``backward``."""
    callback = sys._getframe(1)
    return callback.f_back or sys._current_frames().get(threading.main_thread().ident or 0)


def _call_site(frame: FrameType | None) -> str:
    """The user's innermost line; the innermost of all where none is the user's."""
    found = users_frame(frame) or frame
    return f"{line_of(found)} in {found.f_code.co_name}" if found else "(no Python frame)"


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """A CPU copy of the tensor's exact value, or None where it is unknown."""
    ops: Any = torch.ops.prismscale_null
    return ops.known(tensor) if ops.is_known(tensor) else None


def set_known(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """State the value of a small tensor; False, and unknown, where it is too large to carry one."""
    return bool(torch.ops.prismscale_null.set_known(tensor, value))


def state(tensor: torch.Tensor, numbers: Sequence[int]) -> None:
    """State what a kernel leaves in a small tensor of integers, however that is shaped."""
    set_known(tensor, torch.tensor(numbers, dtype=tensor.dtype).view(tensor.shape))


def forget(tensor: torch.Tensor) -> None:
    """The tensor's bytes were overwritten by something that has no value (a received message)."""
    torch.ops.prismscale_null.forget(tensor)
