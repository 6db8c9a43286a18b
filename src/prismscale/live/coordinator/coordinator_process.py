"""The coordinator's process: ``python -m prismscale.live.coordinator.coordinator_process SPEC``."""

from __future__ import annotations

import selectors
import socket
import sys
from pathlib import Path

from prismscale.cluster import Cluster
from prismscale.durations.scenario import Scenario
from prismscale.errors import PrismscaleError
from prismscale.graph.io import load_graph
from prismscale.live.coordinator.coordinator_spec import CoordinatorSpec
from prismscale.live.coordinator.core import Coordinator
from prismscale.live.coordinator.rank_jitter import share_jitter
from prismscale.live.coordinator.wire import Message, MessageKind, Wire
from prismscale.processes.children import die_with_parent
from prismscale.sim.program import compile_job
from prismscale.typed_files import load_json

_READ = selectors.EVENT_READ
_READ_WRITE = _READ | selectors.EVENT_WRITE


def serve(spec: CoordinatorSpec) -> None:
    """Load the graph, wait for the live ranks, and answer them until they end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # Before the graph, which may take minutes: live ranks connect meanwhile.
        listener.bind(spec.socket)
        listener.listen(len(spec.live))
        coordinator = _coordinator(spec)
        wires = dict(_accept(listener) for _ in range(coordinator.expected))
    for rank, wire in wires.items():
        coordinator.join(rank, wire)
    coordinator.go()
    _loop(coordinator, wires)


def _coordinator(spec: CoordinatorSpec) -> Coordinator:
    graph = load_graph(Path(spec.graph))
    cluster, jitter = Cluster.load(spec.cluster), None
    # Before the durations, because they must come from the graph without the shared jitter.
    if spec.follow_speed:
        graph, jitter = share_jitter(graph, spec.live, cluster.node_of)
    scenario = Scenario(
        cluster=cluster,
        faults=spec.faults,
        compute_scale=spec.compute_scale,
        what_ifs=spec.what_ifs,
    )
    durations = scenario.durations(graph, counted=False)
    return Coordinator(
        compile_job(graph),
        durations,
        durations.model,
        spec.live,
        follow_speed=spec.follow_speed,
        jitter=jitter,
    )


def _accept(listener: socket.socket) -> tuple[int, Wire]:
    connection, _ = listener.accept()
    wire = Wire(connection)
    while True:
        messages = wire.receive(None)
        if messages is None:
            raise PrismscaleError("a live rank ended before it was ready")
        for message in messages:
            if message.kind == MessageKind.HELLO:
                return message.position, wire


def _loop(coordinator: Coordinator, wires: dict[int, Wire]) -> None:
    with selectors.DefaultSelector() as selector:
        for rank, wire in wires.items():
            selector.register(wire, _READ, rank)
        waiting: set[int] = set()
        while not coordinator.finished:
            for key, events in selector.select():
                rank = int(key.data)
                messages = _exchanged(wires[rank], events)
                if messages is None:
                    selector.unregister(wires.pop(rank))
                    coordinator.gone(rank)
                    continue
                for message in messages:
                    coordinator.handle(rank, message)
            behind = {rank for rank, wire in wires.items() if wire.has_unsent}
            for rank in (behind ^ waiting) & wires.keys():
                selector.modify(wires[rank], _READ_WRITE if rank in behind else _READ, rank)
            waiting = behind


def _exchanged(wire: Wire, events: int) -> list[Message] | None:
    """Send what was kept for a rank that reads again, and read; None when the rank is gone."""
    try:
        if events & selectors.EVENT_WRITE:
            wire.flush()
        return wire.read() if events & _READ else []
    except OSError:
        return None


def main(arguments: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    die_with_parent()
    try:
        serve(load_json(CoordinatorSpec, Path(arguments[0]), "a coordinator"))
    except PrismscaleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
