"""Reports a captured rank's groups, and its first send or receive, before its program ends.

This is known long before the trace, so the capture of the other pipeline stages can begin early. A
group that is named for a pipeline is known earlier still, and is assumed to carry the messages. If
it carries none, the captures that were started because of it are in vain; there is no other harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Work

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.recorder import Recorder
from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import peer_of
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import save_trace
from prismscale.graph.node import CollectiveOp
from prismscale.graph.pipeline import is_named_for_pipeline


@dataclass(kw_only=True)
class FirstMessage:
    """A CommunicationHook that writes a trace with a single send or receive."""

    spec: CaptureSpec
    recorder: Recorder
    """Answers all communications, and knows the groups."""
    _told: bool = False

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """See :class:`CommunicationHook`."""
        if not self._told:
            first = batch[0]
            if first.op.is_p2p:
                self._tell(first.op, first.group.group_index, peer_of(first))
            elif (group_index := self._pipeline()) is not None:
                self._tell(CollectiveOp.SEND, group_index, 1)
        return self.recorder.communicate(batch)

    def _pipeline(self) -> int | None:
        """Return the group named for a pipeline, once the groups of that name hold all ranks."""
        for group_index, group in enumerate(self.recorder.groups):
            if len(group.ranks) > 1 and is_named_for_pipeline(group.name):
                alike = [g for g in self.recorder.known_groups if g.name == group.name]
                if len({rank for g in alike for rank in g.ranks}) == self.spec.world_size:
                    return group_index
        return None

    def _tell(self, op: CollectiveOp, group_index: int, peer: int) -> None:
        self._told = True
        spec, recorder = self.spec, self.recorder
        builder = TraceBuilder(rank=spec.rank, world_size=spec.world_size, groups=recorder.groups)
        builder.add_communication(op, 0, group_index=group_index, peer=peer)
        save_trace(builder.build(known_groups=recorder.known_groups), spec.first_message_path)
