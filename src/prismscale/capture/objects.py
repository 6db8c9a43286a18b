"""Object collectives whose sender does not exist.

``broadcast_object_list``, ``scatter_object_list`` and ``recv_object_list`` receive a size into
uninitialised memory and then as many pickled bytes. No tensor rule can answer that, so while one
of them runs this module knows what arrives unless a recorded value does: the objects that this
rank itself would have contributed (the mirror rule, on objects).

========================= ====================================================================
``broadcast_object_list`` the list that this rank passed in
``scatter_object_list``   what this rank last gave to ``gather_object`` in the same group, else
                          the content of its output list
``recv_object_list``      shapes that a pipeline stage is told, see
                          :mod:`prismscale.capture.stage_metadata`; else unknown: refused with the
                          line that receives
========================= ====================================================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d

from prismscale.capture import checkpointing
from prismscale.capture.callsite import call_site
from prismscale.capture.stage_metadata import StageMetadata
from prismscale.errors import UsageError


class ObjectMirror:
    """Stand-ins for the objects that are being received, if any."""

    def __init__(self) -> None:
        self._expected: list[Any] | None = None
        self._is_known = True
        self._gathered: dict[Any, Any] = {}
        self.stages = StageMetadata()

    def offer(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Fill what an object collective receives; False outside of object collectives.

        Raises :class:`UsageError` for a point-to-point receive, whose content nobody here knows.
        """
        if self._expected is None:
            return False
        if not self._is_known:
            raise UsageError(
                f"{call_site()} receives objects from a rank that is not here: capture the sending "
                "rank at the same time (pipeline stages that exchange their metadata need one "
                "captured rank each), or give static shapes (PipelineStage(input_args=…, "
                "output_args=…))"
            )
        to_tensor: Any = distributed_c10d._object_to_tensor
        parts = [to_tensor(item, "cpu", None)[0] for item in self._expected]
        for output in outputs:
            if output.dtype is torch.uint8:
                data = torch.cat(parts)
                output.zero_()
                output[: data.numel()].copy_(data)
            else:
                sizes = [part.numel() for part in parts]
                output.copy_(torch.tensor(sizes, dtype=output.dtype).view(output.shape))
        return True

    def forget(self) -> None:
        """Drop what the last emulated rank gave."""
        self._gathered.clear()

    @contextmanager
    def expecting(self, objects: list[Any], *, is_known: bool = True) -> Iterator[None]:
        """Answer receives in the block with ``objects``."""
        self._expected, self._is_known = objects, is_known
        try:
            yield
        finally:
            self._expected = None

    def wrapped(self) -> dict[str, Callable[..., Any]]:
        """torch's object collectives, by name, that tell this mirror what they expect."""
        original_broadcast = distributed_c10d.broadcast_object_list
        original_scatter = distributed_c10d.scatter_object_list
        original_receive = distributed_c10d.recv_object_list
        original_send = distributed_c10d.send_object_list
        original_gather = distributed_c10d.gather_object

        @functools.wraps(original_broadcast)
        def broadcast_object_list(object_list: list[Any], *rest: Any, **named: Any) -> Any:
            with self.expecting(list(object_list)):
                return original_broadcast(object_list, *rest, **named)

        @functools.wraps(original_scatter)
        def scatter_object_list(
            scatter_object_output_list: list[Any], *rest: Any, **named: Any
        ) -> Any:
            group = _group_of(named, rest, position=2)
            reply = self._gathered.pop(group, *scatter_object_output_list[:1])
            with self.expecting([checkpointing.coordinated(reply)]):
                return original_scatter(scatter_object_output_list, *rest, **named)

        @functools.wraps(original_receive)
        def recv_object_list(object_list: list[Any], *rest: Any, **named: Any) -> Any:
            known = self.stages.expected(sys._getframe())
            objects = list(object_list) if known is None else [known]
            with self.expecting(objects, is_known=known is not None):
                return original_receive(object_list, *rest, **named)

        @functools.wraps(original_send)
        def send_object_list(object_list: list[Any], *rest: Any, **named: Any) -> Any:
            self.stages.sent(object_list)
            return original_send(object_list, *rest, **named)

        @functools.wraps(original_gather)
        def gather_object(
            obj: Any, object_gather_list: list[Any] | None = None, *rest: Any, **named: Any
        ) -> Any:
            group = _group_of(named, rest, position=1)
            self._gathered[group] = obj
            original_gather(obj, object_gather_list, *rest, **named)
            if object_gather_list is not None:
                checkpointing.correct_plans(object_gather_list, distributed_c10d.get_rank(group))

        return {
            "broadcast_object_list": broadcast_object_list,
            "scatter_object_list": scatter_object_list,
            "recv_object_list": recv_object_list,
            "send_object_list": send_object_list,
            "gather_object": gather_object,
        }


MIRROR = ObjectMirror()
"""Of this process: one rank is emulated at a time."""


def _group_of(named: dict[str, Any], rest: Sequence[Any], *, position: int) -> Any:
    """The group argument, given by name or as ``rest[position]``; the default group is None."""
    group = named.get("group", rest[position] if len(rest) > position else None)
    return None if group is distributed_c10d.GroupMember.WORLD else group
