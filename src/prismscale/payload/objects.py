"""Object collectives where most ranks do not exist.

Objects travel as pickled bytes, in two or three messages: a length, then as many bytes. No tensor
rule can answer that. So while an object collective runs, this module

* gives every pickle the length that all ranks agree on (:mod:`prismscale.payload.object_lengths`);
* supplies what arrives if no recorded value does: the objects that this rank itself would have
  contributed (the mirror rule, on objects). They replace bytes that do not exist.

========================= ====================================================================
``broadcast_object_list`` the list that this rank passed in
``scatter_object_list``   what this rank last gave to ``gather_object`` in the same group, else
                          the content of its output list
``recv_object_list``      shapes that a pipeline stage receives, see
                          :mod:`prismscale.payload.stages.pipeline_shapes`; anything else is
                          refused with an error that names the receiving line
``gather_object``,        this rank's own object in each place (save plans: see
``all_gather_object``     :mod:`prismscale.payload.checkpoint_plans`)
========================= ====================================================================
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import distributed_c10d

from prismscale.emulation.background import is_background
from prismscale.emulation.call_site import call_site
from prismscale.emulation.hook import GroupHandle
from prismscale.errors import UsageError
from prismscale.payload import checkpoint_plans
from prismscale.payload.object_lengths import Call, ObjectLengths, rounded
from prismscale.payload.stages.deepspeed_stages import DeepSpeedStages
from prismscale.payload.stages.pipeline_shapes import StageMetadata

Pickled = tuple[torch.Tensor, torch.Tensor]
"""The bytes of an object and their number, as torch makes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledObjects:
    """A rule's answer to an object collective."""

    objects: list[Any] = field(default_factory=list)
    must_arrive: str = ""
    """Why only recorded bytes are accepted, for an error. Empty: :attr:`objects` arrive."""


class ObjectRules(Protocol):
    """The user's rules for object collectives."""

    def objects(
        self, op: str, group: GroupHandle, objects: Sequence[Any], root: int = -1
    ) -> RuledObjects | None:
        """Return what arrives on this rank, which passed ``objects`` in; None if no rule says.

        The answer has as many objects, or one of each member. ``root`` is the group rank of the
        sender; -1 if all members send.
        """
        ...


@dataclass(kw_only=True, slots=True)
class ObjectCall:
    """One object collective under way on this thread."""

    objects: list[Any]
    """The objects to receive, in order, if no bytes arrive."""
    shared: Call | None = None
    """The call as all ranks of the job name it; None if they have nothing to agree on."""
    may_drop: bool = False
    """A pickle longer than the agreed length is not sent: every rank has such an object itself."""
    is_known: bool = True
    is_certain: bool = False
    """These objects arrive, whatever the bytes say."""
    stands_in: bool = False
    """True if the bytes that arrived were made up here."""
    must_arrive: str = ""
    """Why bytes must not be made up; empty if they may be."""
    pickles: list[Pickled] = field(default_factory=list)
    taken: int = 0

    def padded(self, pickled: Pickled, lengths: ObjectLengths) -> Pickled:
        """Return a pickle of this rank at the agreed length; bytes after its end have no effect.

        If the agreed length is shorter, a pickle that must arrive keeps all its bytes. Of any other
        only zeros travel.
        """
        data, _ = pickled
        length = self.length(len(self.pickles), data.numel(), lengths)
        if not self.may_drop:
            length = max(length, data.numel())
        self.pickles.append(pickled)
        whole = data.new_zeros(length)
        # A cut pickle would be an error on a rank that really receives it.
        if data.numel() <= length:
            whole[: data.numel()].copy_(data)
        return whole, torch.tensor([length], device=data.device)

    def length(self, index: int, own: int, lengths: ObjectLengths) -> int:
        """Return the ``index``-th pickle's length in transit; on this rank it is ``own``."""
        if self.shared is None:
            return rounded(own)
        return lengths.agreed(self.shared, min(index, len(self.objects) - 1), own)

    def follow(self, ruled: RuledObjects | None) -> None:
        """Take over a rule's answer, if any: its objects arrive, whatever the bytes say."""
        if ruled is not None and ruled.must_arrive:
            self.must_arrive = ruled.must_arrive
        elif ruled is not None:
            self.objects, self.is_certain = ruled.objects, True

    def stand_in(self) -> Any:
        """Return the object that replaces the next one to be unpickled."""
        self.taken += 1
        return self.objects[min(self.taken, len(self.objects)) - 1]


class ObjectMirror:
    """Supplies stand-ins for the objects that object collectives receive."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.stages = StageMetadata()
        self.deepspeed_stages = DeepSpeedStages()
        self.lengths = ObjectLengths()
        self.rules: ObjectRules | None = None

    @property
    def _call(self) -> ObjectCall | None:
        return getattr(self._threads, "call", None)

    @property
    def is_calling(self) -> bool:
        """Whether an object collective is under way on this thread."""
        return self._call is not None

    @property
    def knows_object(self) -> bool:
        """Whether an object collective is under way on this thread, and its objects are known."""
        return self._call is not None and self._call.is_known

    @property
    def lacks_object(self) -> bool:
        """Whether an object collective is under way here and lacks a stand-in for an object."""
        return self._call is not None and any(found is None for found in self._call.objects)

    @property
    def _gathered(self) -> dict[Any, Any]:
        gathered: dict[Any, Any] = self._threads.__dict__.setdefault("gathered", {})
        return gathered

    @contextmanager
    def shared_in(
        self, folder: Path, *, while_true: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Agree with the other ranks of the job through ``folder`` while the block runs.

        This rank waits for what the first rank leaves there only as long as ``while_true`` answers
        True.
        """
        with (
            self.stages.shared_in(folder, while_true=while_true),
            self.deepspeed_stages.shared_in(folder, while_true=while_true),
            self.lengths.shared_in(folder),
        ):
            yield

    def offer(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Fill the outputs of an object collective; return False outside object collectives.

        Raises :class:`UsageError` for a point-to-point receive of unknown content, and where a rule
        demands a recorded value.
        """
        call = self._call
        if call is None:
            return False
        if not call.is_known:
            raise UsageError(
                f"{call_site()} receives objects from a rank that is not here: capture the sending "
                "rank at the same time (pipeline stages that exchange their metadata need one "
                "captured rank each), or give static shapes (PipelineStage(input_args=…, "
                "output_args=…))"
            )
        if call.must_arrive:
            raise UsageError(
                f"{call.must_arrive}, and the rank that sends it was not captured: only ranks that "
                "are captured leave what they send (--max-captures)"
            )
        for output in outputs:
            if output.dtype is torch.uint8:
                output.zero_()
                call.stands_in = True
            else:
                own = map(_pickled_length, call.objects)
                lengths = [call.length(k, n, self.lengths) for k, n in enumerate(own)]
                output.copy_(torch.tensor(lengths, dtype=output.dtype).view(output.shape))
        return True

    def forget(self) -> None:
        """Drop the last emulated rank's gathered objects, agreed lengths and user rules."""
        self._gathered.clear()
        self.rules = None
        self.lengths.forget()

    @contextmanager
    def calling(self, call: ObjectCall, name: str = "", group: Any = None) -> Iterator[None]:
        """While the block runs, ``call`` is under way on this thread.

        It is the collective ``name`` on ``group`` (None: the default group); without a name it is
        between two ranks only.
        """
        handle = getattr(group or distributed_c10d.GroupMember.WORLD, "handle", None)
        if name and handle is not None and not is_background():
            call.shared = self.lengths.next_call(name, handle.group_index)
        self._threads.call = call
        try:
            yield
        finally:
            self._threads.call = None

    def _ruled(self, call: ObjectCall, op: str, group: Any, source: tuple[Any, Any] | None) -> None:
        """Let ``call`` follow the user's rule, if there is one.

        ``source`` is the global and the group rank of the sender, as the program gave them; None
        if all members send.
        """
        handle = getattr(group or distributed_c10d.GroupMember.WORLD, "handle", None)
        if self.rules is None or handle is None or is_background():
            return
        root = -1
        if source is not None:
            global_rank, group_rank = source
            root = handle.ranks.index(global_rank or 0) if group_rank is None else group_rank
        call.follow(self.rules.objects(op, handle, call.objects, root))

    def wrapped(self) -> dict[str, Callable[..., Any]]:
        """Return wrappers of torch's object collectives, by name, that report to this mirror."""
        rooted = (self._broadcast, self._scatter, self._receive, self._send)
        every = (self._gather, self._all_gather)
        made = (make() for make in (*rooted, *every, self._pickling, self._unpickling))
        return {function.__name__: function for function in made}

    def _broadcast(self) -> Callable[..., Any]:
        original = distributed_c10d.broadcast_object_list

        @functools.wraps(original)
        def broadcast_object_list(object_list: list[Any], *rest: Any, **named: Any) -> Any:
            group = _group_of(named, rest, position=1)
            call = ObjectCall(objects=list(object_list))
            self._ruled(call, original.__name__, group, _source(named, rest, 0, 3))
            with self.calling(call, "broadcast", group):
                return original(object_list, *rest, **named)

        return broadcast_object_list

    def _scatter(self) -> Callable[..., Any]:
        original = distributed_c10d.scatter_object_list

        @functools.wraps(original)
        def scatter_object_list(
            scatter_object_output_list: list[Any], *rest: Any, **named: Any
        ) -> Any:
            group = _group_of(named, rest, position=2)
            own = self._gathered.pop(group, *scatter_object_output_list[:1])
            inputs = named.get("scatter_object_input_list", rest[0] if rest else None)
            is_certain = inputs is None and checkpoint_plans.is_plan(own)
            call = ObjectCall(objects=[checkpoint_plans.coordinated(own)], is_certain=is_certain)
            self._ruled(call, original.__name__, group, _source(named, rest, 1, 3))
            with self.calling(call, "scatter", group):
                return original(scatter_object_output_list, *rest, **named)

        return scatter_object_list

    def _receive(self) -> Callable[..., Any]:
        original = distributed_c10d.recv_object_list

        @functools.wraps(original)
        def recv_object_list(object_list: list[Any], *rest: Any, **named: Any) -> Any:
            known = self.stages.expected(sys._getframe())
            objects = list(object_list) if known is None else [known]
            with self.calling(ObjectCall(objects=objects, is_known=known is not None)):
                return original(object_list, *rest, **named)

        return recv_object_list

    def _send(self) -> Callable[..., Any]:
        original = distributed_c10d.send_object_list

        @functools.wraps(original)
        def send_object_list(object_list: list[Any], *rest: Any, **named: Any) -> Any:
            self.stages.sent(object_list)
            with self.calling(ObjectCall(objects=list(object_list))):
                return original(object_list, *rest, **named)

        return send_object_list

    def _gather(self) -> Callable[..., Any]:
        original = distributed_c10d.gather_object

        @functools.wraps(original)
        def gather_object(
            obj: Any, object_gather_list: list[Any] | None = None, *rest: Any, **named: Any
        ) -> Any:
            group = _group_of(named, rest, position=1)
            self._gathered[group] = obj
            call = ObjectCall(objects=[obj], may_drop=True)
            if object_gather_list is not None:
                self._ruled(call, original.__name__, group, None)
            with self.calling(call, "gather", group):
                original(obj, object_gather_list, *rest, **named)
            if object_gather_list is not None:
                checkpoint_plans.correct_gathered(
                    object_gather_list, distributed_c10d.get_rank(group)
                )

        return gather_object

    def _all_gather(self) -> Callable[..., Any]:
        original = distributed_c10d.all_gather_object

        @functools.wraps(original)
        def all_gather_object(object_list: list[Any], obj: Any, *rest: Any, **named: Any) -> Any:
            group = _group_of(named, rest, position=0)
            call = ObjectCall(objects=[obj], may_drop=True)
            self._ruled(call, original.__name__, group, None)
            with self.calling(call, "all_gather", group):
                original(object_list, obj, *rest, **named)

        return all_gather_object

    def _pickling(self) -> Callable[..., Any]:
        original: Any = distributed_c10d._object_to_tensor

        @functools.wraps(original)
        def _object_to_tensor(*arguments: Any) -> Any:
            call = self._call
            pickled = original(*arguments)
            return pickled if call is None else call.padded(pickled, self.lengths)

        return _object_to_tensor

    def _unpickling(self) -> Callable[..., Any]:
        original: Any = distributed_c10d._tensor_to_object

        @functools.wraps(original)
        def _tensor_to_object(tensor: Any, tensor_size: Any, *rest: Any, **named: Any) -> Any:
            call = self._call
            if call is None:
                return original(tensor, tensor_size, *rest, **named)
            if call.stands_in or call.is_certain:
                return call.stand_in()
            # No pickle begins with a zero: this one was too long for its sender to send.
            if call.may_drop and not int(tensor[0]):
                return original(*call.pickles[0], *rest, **named)
            return original(tensor, tensor_size, *rest, **named)

        return _tensor_to_object


MIRROR = ObjectMirror()
"""The mirror of this process, which emulates one rank at a time."""


def _pickled_length(item: Any) -> int:
    to_tensor: Any = distributed_c10d._object_to_tensor
    plain = getattr(to_tensor, "__wrapped__", to_tensor)
    return int(plain(item, "cpu", None)[0].numel())


def _source(
    named: dict[str, Any], rest: Sequence[Any], position: int, group_position: int
) -> tuple[Any, Any]:
    """Return the sender's global and group rank, from ``named`` or ``rest``; None if not given."""
    src = named.get("src", rest[position] if len(rest) > position else None)
    of_group = rest[group_position] if len(rest) > group_position else None
    return src, named.get("group_src", of_group)


def _group_of(named: dict[str, Any], rest: Sequence[Any], *, position: int) -> Any:
    """Return the group argument, from ``named`` or ``rest``; None for the default group."""
    group = named.get("group", rest[position] if len(rest) > position else None)
    return None if group is distributed_c10d.GroupMember.WORLD else group
