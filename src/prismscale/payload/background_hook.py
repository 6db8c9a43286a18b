"""Answers communications in the background; the program's own go to the hook."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import Work

from prismscale.emulation.background import is_background
from prismscale.emulation.hook import Collective, CommunicationHook
from prismscale.emulation.work import completed
from prismscale.payload.mirror import MirrorPayload


class BackgroundAnswers:
    """Passes the program's communications on; answers those in the background itself."""

    def __init__(self, hook: CommunicationHook) -> None:
        self._hook = hook
        self._mirror: MirrorPayload | None = None

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """As peers that do what this rank does, where nobody records."""
        if not is_background():
            return self._hook.communicate(batch)
        self._mirror = self._mirror or MirrorPayload()
        for collective in batch:
            self._mirror.fill(collective)
        return completed(tuple(t for c in batch for t in c.outputs))
