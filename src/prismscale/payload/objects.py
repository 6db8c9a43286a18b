"""Object collectives among ranks most of which do not exist.

Objects travel as pickled bytes, in two or three messages: a length, then as many bytes. No tensor
rule can answer that. So while an object collective runs, this module

* lets every pickle be as long as all ranks agree (:mod:`prismscale.payload.object_lengths`);
* knows what arrives unless a recorded value does: the objects that this rank itself would have
  contributed (the mirror rule, on objects). They take the place of bytes that nobody has.

========================= ====================================================================
``broadcast_object_list`` the list that this rank passed in
``scatter_object_list``   what this rank last gave to ``gather_object`` in the same group, else
                          the content of its output list
``recv_object_list``      shapes that a pipeline stage is told, see
                          :mod:`prismscale.payload.stages.pipeline_shapes`; else unknown: refused
                          with the line that receives
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
"""The bytes of an object, and how many they are, as torch makes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledObjects:
    """What a rule says of an object collective."""

    objects: list[Any] = field(default_factory=list)
    must_arrive: str = ""
    """Nothing but recorded bytes will do; why, for an error. Empty: :attr:`objects` arrive."""


class ObjectRules(Protocol):
    """What a user says of object collectives."""

    def objects(
        self, op: str, group: GroupHandle, objects: Sequence[Any], root: int = -1
    ) -> RuledObjects | None:
        """What arrives on this rank, which passed ``objects`` in: as many objects, or one of each
        member; None where nothing is said. ``root``: group rank of who sends; -1: all do."""
        ...


@dataclass(kw_only=True, slots=True)
class ObjectCall:
    """One object collective under way on this thread."""

    objects: list[Any]
    """What it receives, one after another, where no bytes arrive."""
    shared: Call | None = None
    """How the ranks of a job know it; None where they have nothing to agree on."""
    may_cut: bool = False
    """What does not fit the length is not needed: every rank has it itself."""
    is_known: bool = True
    is_certain: bool = False
    """These objects arrive, whatever the bytes say."""
    stands_in: bool = False
    """The bytes that arrived were made up here."""
    must_arrive: str = ""
    """Why bytes must not be made up; empty: they may."""
    pickles: list[Pickled] = field(default_factory=list)
    taken: int = 0

    def padded(self, pickled: Pickled, lengths: ObjectLengths) -> Pickled:
        """A pickle of this rank at the length that ranks agree on; bytes beyond its end do nothing.

        What must not be cut keeps its bytes, where others agreed on fewer.
        """
        data, _ = pickled
        length = self.length(len(self.pickles), data.numel(), lengths)
        if not self.may_cut:
            length = max(length, data.numel())
        self.pickles.append(pickled)
        whole = data.new_zeros(length)
        n = min(length, data.numel())
        whole[:n].copy_(data[:n])
        return whole, torch.tensor([length], device=data.device)

    def length(self, index: int, own: int, lengths: ObjectLengths) -> int:
        """How long the pickle of the ``index``-th object is on its way; ``own``: on this rank."""
        if self.shared is None:
            return rounded(own)
        return lengths.agreed(self.shared, min(index, len(self.objects) - 1), own)

    def follow(self, ruled: RuledObjects | None) -> None:
        """What a rule says arrives, whatever the bytes say."""
        if ruled is not None and ruled.must_arrive:
            self.must_arrive = ruled.must_arrive
        elif ruled is not None:
            self.objects, self.is_certain = ruled.objects, True

    def stand_in(self) -> Any:
        """The object in place of the next one to be unpickled."""
        self.taken += 1
        return self.objects[min(self.taken, len(self.objects)) - 1]


class ObjectMirror:
    """Stand-ins for the objects that are being received, if any."""

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
        """Whether an object collective is under way here, and what it brings is known."""
        return self._call is not None and self._call.is_known

    @property
    def lacks_object(self) -> bool:
        """Whether an object collective is under way here, and this rank has nothing in place of
        what it brings."""
        return self._call is not None and any(found is None for found in self._call.objects)

    @property
    def _gathered(self) -> dict[Any, Any]:
        gathered: dict[Any, Any] = self._threads.__dict__.setdefault("gathered", {})
        return gathered

    @contextmanager
    def shared_in(
        self, folder: Path, *, while_true: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Agree with the other ranks of the job through ``folder``; what the first rank tells is
        waited for only ``while_true``."""
        with (
            self.stages.shared_in(folder, while_true=while_true),
            self.deepspeed_stages.shared_in(folder, while_true=while_true),
            self.lengths.shared_in(folder),
        ):
            yield

    def offer(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Fill what an object collective receives; False outside of object collectives.

        Raises :class:`UsageError` for a point-to-point receive, whose content nobody here knows.
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
        """Drop what the last emulated rank gave, and what its user said."""
        self._gathered.clear()
        self.rules = None
        self.lengths.forget()

    @contextmanager
    def calling(self, call: ObjectCall, name: str = "", group: Any = None) -> Iterator[None]:
        """``call`` runs on this thread meanwhile: a collective ``name`` on ``group`` (None: the
        default one), or between two ranks only."""
        handle = getattr(group or distributed_c10d.GroupMember.WORLD, "handle", None)
        if name and handle is not None and not is_background():
            call.shared = self.lengths.next_call(name, handle.group_index)
        self._threads.call = call
        try:
            yield
        finally:
            self._threads.call = None

    def _ruled(self, call: ObjectCall, op: str, group: Any, source: tuple[Any, Any] | None) -> None:
        """Let ``call`` follow the user's rule, if there is one. ``source``: the rank that sends, by
        its global and by its group rank, as the program said it; None: all do."""
        handle = getattr(group or distributed_c10d.GroupMember.WORLD, "handle", None)
        if self.rules is None or handle is None or is_background():
            return
        root = -1
        if source is not None:
            global_rank, group_rank = source
            root = handle.ranks.index(global_rank or 0) if group_rank is None else group_rank
        call.follow(self.rules.objects(op, handle, call.objects, root))

    def wrapped(self) -> dict[str, Callable[..., Any]]:
        """torch's object collectives, by name, that tell this mirror what they expect."""
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
            call = ObjectCall(objects=[obj], may_cut=True)
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
            call = ObjectCall(objects=[obj], may_cut=True)
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
            if call.may_cut and int(tensor_size) < call.pickles[0][0].numel():
                return original(*call.pickles[0], *rest, **named)
            return original(tensor, tensor_size, *rest, **named)

        return _tensor_to_object


MIRROR = ObjectMirror()
"""Of this process: one rank is emulated at a time."""


def _pickled_length(item: Any) -> int:
    to_tensor: Any = distributed_c10d._object_to_tensor
    plain = getattr(to_tensor, "__wrapped__", to_tensor)
    return int(plain(item, "cpu", None)[0].numel())


def _source(
    named: dict[str, Any], rest: Sequence[Any], position: int, group_position: int
) -> tuple[Any, Any]:
    """Global and group rank of who sends, given by name or in ``rest``; None where not given."""
    src = named.get("src", rest[position] if len(rest) > position else None)
    of_group = rest[group_position] if len(rest) > group_position else None
    return src, named.get("group_src", of_group)


def _group_of(named: dict[str, Any], rest: Sequence[Any], *, position: int) -> Any:
    """The group argument, given by name or as ``rest[position]``; the default group is None."""
    group = named.get("group", rest[position] if len(rest) > position else None)
    return None if group is distributed_c10d.GroupMember.WORLD else group
