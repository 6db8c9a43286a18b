"""The last steps of a recorded stream, as a capture would choose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prismscale.capture.node_stream import NodeStream, Sample
from prismscale.capture.recorder import Recorder
from prismscale.capture.step_kinds import steps_of
from prismscale.devices.protocol import CaptureDevice
from prismscale.graph.trace import GroupRecord, RankTrace


def last_steps(stream: NodeStream, count: int) -> list[Sample]:
    """As parts of the stream; of each it is told whether the one before is like it."""
    steps = steps_of(stream)
    kinds = [None, *(s.kind for s in steps)]
    return [
        Sample(start=s.start, stop=s.stop, follows_its_like=kinds[s.number - 1] == s.kind)
        for s in steps[-count:]
    ]


def trace_of(
    stream: NodeStream,
    device: CaptureDevice,
    groups: Sequence[GroupRecord],
    *,
    rank: int,
    world_size: int,
    samples: int,
) -> RankTrace:
    """The trace of a rank that knows no groups but its own."""
    return RankTrace(
        rank=rank,
        world_size=world_size,
        groups=tuple(groups),
        known_groups=tuple(groups),
        **stream.columns(device, last_steps(stream, samples)).by_name(),
    )


def recorded_trace_of(
    recorder: Recorder, device: CaptureDevice, *, rank: int, world_size: int, samples: int = 2
) -> RankTrace:
    """The trace of a rank that was recorded."""
    stream, groups = recorder.stream, recorder.groups
    own = trace_of(stream, device, groups, rank=rank, world_size=world_size, samples=samples)
    return replace(own, known_groups=tuple(recorder.known_groups))
