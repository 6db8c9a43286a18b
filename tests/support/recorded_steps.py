"""The last steps of a recorded stream, as a capture would choose them."""

from __future__ import annotations

from prismscale.capture.node_stream import NodeStream, Sample
from prismscale.capture.step_kinds import steps_of


def last_steps(stream: NodeStream, count: int) -> list[Sample]:
    """As parts of the stream; of each it is told whether the one before is like it."""
    steps = steps_of(stream)
    kinds = [None, *(s.kind for s in steps)]
    return [
        Sample(start=s.start, stop=s.stop, follows_its_like=kinds[s.number - 1] == s.kind)
        for s in steps[-count:]
    ]
