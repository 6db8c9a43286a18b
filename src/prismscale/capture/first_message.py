"""What a captured rank tells before its program ends: its groups, and along which it sends first.

That is known long before the trace is: who looks at stages of a pipeline can begin with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Work

from prismscale.capture.recorder import Recorder
from prismscale.emulation.hook import Collective, CommunicationHook
from prismscale.emulation.instance_ids import peer_of
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import save_trace
from prismscale.graph.trace import RankTrace


@dataclass(kw_only=True)
class FirstMessage:
    """A CommunicationHook that writes a trace with nothing in it but the first send or receive."""

    hook: CommunicationHook
    """Answers."""
    recorder: Recorder
    """Knows the groups."""
    rank: int
    world_size: int
    path: Path
    _told: bool = False

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """See :class:`CommunicationHook`."""
        if not self._told and batch[0].op.is_p2p:
            self._told = True
            save_trace(self._trace(batch[0]), self.path)
        return self.hook.communicate(batch)

    def _trace(self, message: Collective) -> RankTrace:
        builder = TraceBuilder(
            rank=self.rank, world_size=self.world_size, groups=self.recorder.groups
        )
        builder.add_communication(
            message.op,
            message.n_bytes,
            group_index=message.group.group_index,
            peer=peer_of(message),
        )
        return builder.build(known_groups=self.recorder.known_groups)
