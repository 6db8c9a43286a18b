"""Answers to a program that reads values from the null device, and the ledger of these answers.

Values that follow from constants are exact: the extension keeps a real CPU copy of a small storage
for as long as only exact ops write to it. All other values that a program reads do not exist. They
are answered from :class:`ValuePolicy`, and each answer is entered in the :class:`ValueLedger` with
the line that read it.
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


class Question(IntEnum):
    """Kind of a question about an unknown value; the numbers are those of ``csrc/policy.h``."""

    FLOAT = 0
    INTEGER = 1
    BOOLEAN = 2
    COUNT = 3
    HISTOGRAM = 4
    FOUND_INF = 5
    CHECK = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuePolicy:
    """The answers to questions about unknown values.

    - ``floating``: a loss, a norm, a scale. Finite and positive, so that logs and ratios work.
    - ``integer``: a count. One rather than zero, because counts are divided by.
    - ``boolean``: a test. False ends rejection loops and finds neither NaN nor infinity.
    - ``check``: whether a test holds for all elements (``all``, ``allclose``), or two tensors are
      equal. True, because programs stop where such a check fails.
    - ``nonzero_fraction``: the share of elements that ``nonzero``, masks and ``unique`` keep.
    - ``routing``: relative load of each bin (tokens by expert), for histograms with as many bins.
    - ``routing_of_ranks``: whether ``routing`` holds loads of ranks. They then apply to histograms
      whose number of bins is a multiple of the number of ranks.
    - ``routing_exponent``: for all other histograms. Bin ``i`` (from 1) gets a share in proportion
      to ``i ** -exponent``; 0: equal shares.

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
        """Return the answer to ``question`` about a tensor of ``elements`` elements."""
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
        """The policy in force. It can be replaced at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: ValuePolicy) -> None:
        self._policy = policy
        load = (ctypes.c_double * len(policy.routing))(*policy.routing)
        self._library.ps_set_routing(
            load, len(policy.routing), policy.routing_of_ranks, policy.routing_exponent
        )

    def uses(self) -> list[ValueUse]:
        """Return every distinct use so far, most frequent first."""
        with self._lock:
            items = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return [
            ValueUse(op=op, call_site=site, answer=answer, count=count)
            for (op, site, answer), count in items
        ]

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Enter no answer to this thread within the block: nobody reads the answers."""
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
    """Return the frame that read the value.

    One of autograd's own threads has no Python frame. Then it is the frame of the main thread,
    which waits in ``backward``.
    """
    callback = sys._getframe(1)
    return callback.f_back or sys._current_frames().get(threading.main_thread().ident or 0)


def _call_site(frame: FrameType | None) -> str:
    """Describe the innermost line of the user's code, or of all code if none is the user's."""
    found = users_frame(frame) or frame
    return f"{line_of(found)} in {found.f_code.co_name}" if found else "(no Python frame)"


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a CPU copy of the tensor's exact value, or None if it is unknown."""
    ops: Any = torch.ops.prismscale_null
    return ops.known(tensor) if ops.is_known(tensor) else None


def set_known(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Set the known value of a small tensor.

    Returns False for a tensor that is too large to carry a value; its value is then unknown.
    """
    return bool(torch.ops.prismscale_null.set_known(tensor, value))


def state(tensor: torch.Tensor, numbers: Sequence[int]) -> None:
    """Set the numbers that a kernel leaves in a small integer tensor of any shape."""
    set_known(tensor, torch.tensor(numbers, dtype=tensor.dtype).view(tensor.shape))


def forget(tensor: torch.Tensor) -> None:
    """Mark a tensor as unknown: bytes without a value (a received message) have overwritten it."""
    torch.ops.prismscale_null.forget(tensor)
