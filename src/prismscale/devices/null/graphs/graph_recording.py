"""A captured graph: launches in the extension (``csrc/graph_capture.h``), calls into Python here.

A communication is not made when it is captured. Each replay makes it, on the stream and between the
launches where the program issued it. It uses *ghosts* in place of the program's tensors: tensors
that own no memory, at the same addresses. A graph holds addresses, not tensors; the memory at these
addresses belongs to its pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch.distributed import Work

from prismscale.emulation.backends.backend_order import blocks_host, is_in_host_memory
from prismscale.emulation.call_site import call_site
from prismscale.emulation.hook import Answer, Captures, Collective
from prismscale.emulation.work import EmulatedWork, in_flight

MODES = ("global", "thread_local", "relaxed")


class _CallKind(IntEnum):
    """How a call is ordered on its stream; see ``csrc/graph_capture.h``."""

    IN_ORDER = 0
    BESIDE = 1
    JOIN = 2
    MARK = 3


class _Communication:
    """A batch of communications that each replay issues, and joins at once or later."""

    def __init__(self, batch: Sequence[Collective], answer: Answer) -> None:
        self._batch = batch
        self._answer = answer
        self._work: Work | None = None

    def issue(self) -> None:
        """Issue the batch."""
        self._work = self._answer(self._batch)

    def join(self) -> None:
        """Make the current stream wait for the batch."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class GraphRecording:
    """A CUDA graph whose capture begins, on the current stream, with the construction.

    Until :meth:`end` it is an :class:`~prismscale.emulation.hook.OpenCapture`.

    Raises:
        RuntimeError: another capture is under way in this process.
    """

    def __init__(self, library: ctypes.PyDLL, mode: str) -> None:
        self._library = library
        self._calls: list[Callable[[], None]] = []
        self._awaited: dict[int, Collective] = {}
        """First communication, by call number, of each batch that is not waited for yet."""
        self.device = int(library.ps_current_device())
        self.stream = int(library.ps_current_stream(self.device))
        self._handle = library.ps_graph_begin(self.device, self.stream, MODES.index(mode))
        if self._handle is None:
            raise RuntimeError(
                "another CUDA graph is being captured; the null device captures one at a time"
            )
        Captures.under_way = self

    def end(self) -> int:
        """End the capture; return 0, or the CUDA error with which it ends."""
        Captures.under_way = None
        return int(self._library.ps_graph_end(self._handle))

    @property
    def unjoined(self) -> str:
        """Description of the work that was not joined to the capture's stream; empty if none."""
        text: bytes = self._library.ps_graph_unjoined(self._handle)
        if not text:
            return ""
        issued = (
            f"{c.op.name.lower()} of {c.group.name} at {c.site}" for c in self._awaited.values()
        )
        return "; ".join((text.decode(), *issued))

    def delete(self) -> None:
        """Destroy the graph."""
        if self._handle is not None:
            self._library.ps_graph_delete(self._handle)
            self._handle = None

    @property
    def n_launches(self) -> int:
        """Number of kernels and communications in the graph."""
        return int(self._library.ps_graph_launches(self._handle))

    def replay(self) -> None:
        """Launch the graph on the current stream of its device."""
        library, stream = self._library, ctypes.c_int64()
        current = library.ps_current_stream(self.device)
        while (call := library.ps_graph_replay(self._handle, ctypes.byref(stream))) >= 0:
            library.ps_set_stream(self.device, stream.value)
            Captures.replaying = True
            try:
                self._calls[call]()
            finally:
                Captures.replaying = False
                library.ps_set_stream(self.device, current)

    def communicate(self, batch: Sequence[Collective], answer: Answer) -> Work:
        """Record the batch, so that each replay calls ``answer`` with it.

        A batch in host memory, or issued on a stream that does not capture, is answered now.
        """
        if is_in_host_memory(batch) or not self._is_capturing():
            return answer(batch)
        if blocks_host(batch) or batch[0].group.backend == "gloo":
            _ops().synchronize(self.device)  # forbidden in a capture: raises
        ghosts = _ghosts_of(batch)
        communication = _Communication(ghosts, answer)
        outputs = tuple(tensor for c in batch for tensor in c.outputs)
        for collective in batch:
            self._answer_now(collective)
        if not batch[0].asynchronous:
            self._note(partial(_issue_and_join, communication), _CallKind.IN_ORDER)
            return EmulatedWork(outputs)
        number = self._note(communication.issue, _CallKind.BESIDE)
        self._awaited[number] = ghosts[0]

        def joined(_: timedelta | None) -> None:
            self._awaited.pop(number, None)
            self._note(communication.join, _CallKind.JOIN, number)

        return in_flight(batch, joined)

    def _answer_now(self, collective: Collective) -> None:
        """Set the values that the outputs have during the capture.

        If each replay gives the same ones, they are computed now: how many tokens each rank's
        experts get is known in the capture. All other outputs become unknown.
        """
        if (
            Captures.fill is not None
            and collective.inputs
            and all(map(_ops().lasts_in_graph, collective.inputs))
        ):
            self._library.ps_without_cost(1)
            try:
                Captures.fill(collective)
            finally:
                self._library.ps_without_cost(0)
            return
        for tensor in collective.outputs:
            _ops().forget(tensor)

    def later(self, call: Callable[[], None]) -> None:
        """Run ``call`` at each replay, at this point of the graph."""
        self._note(call, _CallKind.MARK)

    def _is_capturing(self) -> bool:
        stream = self._library.ps_current_stream(self.device)
        return bool(self._library.ps_is_capturing(self.device, stream))

    def _note(self, call: Callable[[], None], kind: _CallKind, joins: int = 0) -> int:
        number = len(self._calls)
        stream = self._library.ps_current_stream(self.device)
        if self._library.ps_graph_call(self.device, stream, number, kind, joins):
            self._calls.append(call)
        return number


def _issue_and_join(communication: _Communication) -> None:
    communication.issue()
    communication.join()


def _ghosts_of(batch: Sequence[Collective]) -> list[Collective]:
    """Return the same communications on ghosts; a tensor that occurs twice gets one ghost."""
    site = call_site()
    ghosts: dict[int, torch.Tensor] = {}

    def ghost(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in ghosts:
            ghosts[id(tensor)] = _ops().ghost(tensor.detach())
        return ghosts[id(tensor)]

    return [
        replace(
            c,
            inputs=tuple(map(ghost, c.inputs)),
            outputs=tuple(map(ghost, c.outputs)),
            called_ns=0,
            site=site,
        )
        for c in batch
    ]


def _ops() -> Any:
    return torch.ops.prismscale_null
