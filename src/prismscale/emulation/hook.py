"""The one seam: every collective entry point becomes a :class:`Collective`, answered by one hook.

Recording, live emulation and fault injection are hooks. A hook never sees which of the many
spellings of a collective the program used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch.distributed import ReduceOp, Work

from prismscale.graph.node import CollectiveOp


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupHandle:
    """A process group as the hook sees it."""

    group_index: int
    """The k-th group that this rank belongs to, in creation order; 0 is the whole world."""
    ranks: tuple[int, ...]
    """Global ranks in group order."""
    group_rank: int
    """This rank's position in :attr:`ranks`."""
    name: str
    """The program's name for the group (``group_desc`` or mesh axis); may be empty."""
    backend: str
    """The backend the program asked for, for example ``nccl``."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


@dataclass(kw_only=True, slots=True, eq=False)
class Collective:
    """One communication, normalised. Tensors are the program's own; nothing is copied.

    ``inputs`` and ``outputs`` hold, for ``n`` coalesced tensors and a group of ``K``:

    ============== ========================= =========================
    op             inputs                    outputs
    ============== ========================= =========================
    all_reduce     n, updated in place       the same n
    broadcast      n (root's are sent)       the same n
    reduce         n                         the same n (root's are set)
    all_gather     n                         n flat ``[K * numel]`` or ``n * K`` (tensor-major)
    reduce_scatter n flat or ``n * K``       n
    gather         1                         K on the root, none elsewhere
    scatter        K on the root, else none  1
    all_to_all     1 flat (with splits) or K 1 flat (with splits) or K
    send           1                         none
    recv           none                      1
    barrier        none                      none
    ============== ========================= =========================
    """

    op: CollectiveOp
    group: GroupHandle
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    n_bytes: int
    """The larger of input and output bytes, see :class:`CollectiveOp`."""
    root: int = -1
    """Group rank of the root of a rooted collective, or of the peer of a send or recv."""
    reduce_op: ReduceOp | None = None
    input_splits: Sequence[int] = ()
    """all_to_all with one flat tensor: rows for each member; empty for an even split."""
    output_splits: Sequence[int] = ()
    tag: int = 0
    asynchronous: bool = False
    """True where the program keeps the Work and waits for it later (or never)."""
    called_ns: int = 0
    """Time of the program's call, on the monotonic clock; time after it is the emulation's. 0 if
    unknown."""
    site: str = ""
    """``file:line`` of the program's call, set if the stack may no longer show it; else empty."""

    @property
    def is_of_library(self) -> bool:
        """Whether a library's own kernels exchange the bytes and pass no tensor to the group.

        See :meth:`prismscale.emulation.entry_points.EntryPoints.exchange`.
        """
        return self.n_bytes > 0 and not any(t.numel() for t in (*self.inputs, *self.outputs))


class CommunicationHook(Protocol):
    """Answers communications."""

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Start a batch of communications that were issued together; complete them as one Work.

        A batch has more than one element only for coalesced or batched calls. On return, or once
        the Work is waited for, every output holds defined values.
        """
        ...


Answer = Callable[[Sequence[Collective]], Work]


class OpenCapture(Protocol):
    """A CUDA graph under capture: what the program does now happens at each replay."""

    def communicate(self, batch: Sequence[Collective], answer: Answer) -> Work:
        """Arrange that each replay calls ``answer`` with ``batch``.

        A batch in host memory, or issued on a stream that does not capture, is answered now.
        """
        ...

    def later(self, call: Callable[[], None]) -> None:
        """Run ``call`` at each replay, at this point of the graph."""
        ...


class Captures:
    """State of CUDA graph capture in this process."""

    under_way: ClassVar[OpenCapture | None] = None
    """The capture under way, set by a device that has graphs; None if there is none."""
    replaying: ClassVar[bool] = False
    """Whether a graph calls what lies in it, and not the program."""
    fill: ClassVar[Callable[[Collective], None] | None] = None
    """Defines a communication's outputs as if peers did what this rank does; None: not possible."""


def in_its_place(call: Callable[[], None]) -> None:
    """Run ``call`` now or, during a graph capture, at this point of each replay."""
    if Captures.under_way is None:
        call()
    else:
        Captures.under_way.later(call)


class GroupObserver(Protocol):
    """Is notified of process groups as the program creates them."""

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """A group was created; ``group_index`` is None where this rank is not a member."""
        ...


class GroupObservers:
    """Passes each notification on to several observers, in order."""

    def __init__(self, *observers: GroupObserver) -> None:
        self._observers = observers

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Notify all observers."""
        for observer in self._observers:
            observer.group_created(ranks, name, backend, group_index)
