"""Runs one rank of a job whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from prismscale.emulation import untraced
from prismscale.emulation.after_import import changed
from prismscale.emulation.background import BackgroundAnswers
from prismscale.emulation.hook import Captures, Collective, CommunicationHook, GroupObserver
from prismscale.emulation.install import Groups, install, rebound
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.payload import checkpoint_plans, checkpoint_saves, uneven_shards
from prismscale.payload.mirror import MirrorPayload
from prismscale.payload.object_marks import ObjectMarks, marked_objects
from prismscale.payload.objects import MIRROR


@contextmanager
def absent_peers(
    environment: RankEnvironment,
    hook: CommunicationHook,
    observer: GroupObserver | None = None,
    *,
    objects: bool = True,
    marks: ObjectMarks | None = None,
) -> Iterator[Groups]:
    """Let ``torch.distributed`` run as the rank of ``environment``, with answers for its peers.

    ``hook`` answers every communication of the program itself. Checkpoints, background
    communications and, unless their bytes are known (``objects`` is False), object collectives are
    answered here. ``marks`` decides which bytes may be unpickled; None: all. Raises as
    :func:`.install`.
    """
    # Made on first use: it holds a block of memory, which would count as the program's.
    mirror = cache(MirrorPayload)

    def fill(collective: Collective) -> None:
        mirror().fill(collective)

    answers = BackgroundAnswers(hook, fill)
    with ExitStack() as undo:
        Captures.fill = fill
        undo.callback(setattr, Captures, "fill", None)
        groups = undo.enter_context(install(environment, answers, observer))
        undo.callback(MIRROR.forget)
        undo.callback(checkpoint_plans.restore)
        if marks is not None:
            # Entered before the mirror, which pads pickles and stands in for missing objects.
            undo.enter_context(marked_objects(marks))
        for module in (checkpoint_saves, uneven_shards, untraced):
            undo.enter_context(changed(module.changes()))
        for name, replacement in MIRROR.wrapped().items() if objects else ():
            undo.enter_context(rebound(name, replacement))
        yield groups
