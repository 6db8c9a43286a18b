"""The stream of nodes: what is final as it is recorded, and what is told later."""

from __future__ import annotations

from dataclasses import replace

from prismscale.capture.node_stream import NodeStream, StreamNode
from prismscale.devices.cpu import CpuDevice
from prismscale.graph.node import NodeKind
from support.recorded_steps import last_steps

COMPUTE_NS = 100


def stream_of(steps: int) -> NodeStream:
    """Steps of a computation, a communication that follows it, and a computation that waits."""
    stream = NodeStream()
    before: tuple[int, ...] = ()
    for _ in range(steps):
        first = stream.append(compute(before))
        made = stream.append(StreamNode(kind=NodeKind.COLLECTIVE, preds=(first,), lane=0, label=0))
        before = (stream.append(compute((first, made))),)
        stream.mark()
    return stream


def compute(preds: tuple[int, ...]) -> StreamNode:
    """A span of :data:`COMPUTE_NS`."""
    return StreamNode(kind=NodeKind.COMPUTE, preds=preds, lane=0, label=0, ended=COMPUTE_NS)


def test_what_is_told_later_changes_no_node() -> None:
    """It changes durations: the communication's, and that of the computation after it."""
    stream = stream_of(3)
    recorded = [replace(node) for node in stream.nodes]
    stream.took([7], 30)
    stream.took([7], 40, late_ns=5)
    stream.leave_out(60)
    columns = stream.columns(CpuDevice(), last_steps(stream, 2))
    assert stream.nodes == recorded
    assert columns.body_ns_SB.tolist() == [[100, 0, 100], [100, 40, 45]]


def test_only_computation_is_left_out() -> None:
    """A wait with no span before it has nothing to take away from."""
    stream = stream_of(1)
    stream.append(StreamNode(kind=NodeKind.COLLECTIVE, preds=(2,), lane=0, label=0))
    stream.leave_out(60)
    assert stream.columns_so_far(CpuDevice()).prologue_ns.tolist() == [100, 0, 100, 0]


def test_all_so_far_is_prologue() -> None:
    """With a body of no nodes, measured once."""
    columns = stream_of(2).columns_so_far(CpuDevice())
    assert (columns.n_prologue, columns.n_nodes) == (6, 6)
    assert columns.body_ns_SB.shape == (1, 0)
