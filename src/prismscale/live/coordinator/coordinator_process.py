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
from prismscale.live.coordinator.wire import MessageKind, Wire
from prismscale.processes.children import die_with_parent
from prismscale.sim.program import compile_job
from prismscale.typed_files import load_json


def serve(spec: CoordinatorSpec) -> None:
    """Load the graph, wait for the live ranks, and answer them until they end."""
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
    coordinator = Coordinator(
        compile_job(graph),
        durations,
        durations.model,
        spec.live,
        follow_speed=spec.follow_speed,
        jitter=jitter,
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(spec.socket)
        listener.listen(coordinator.expected)
        wires = dict(_accept(listener) for _ in range(coordinator.expected))
    for rank, wire in wires.items():
        coordinator.join(rank, wire)
    coordinator.go()
    _loop(coordinator, wires)


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
            selector.register(wire, selectors.EVENT_READ, rank)
        while not coordinator.finished:
            for key, _ in selector.select():
                rank = int(key.data)
                try:
                    messages = wires[rank].read()
                except OSError:
                    messages = None
                if messages is None:
                    selector.unregister(wires[rank])
                    coordinator.gone(rank)
                    continue
                for message in messages:
                    coordinator.handle(rank, message)


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
