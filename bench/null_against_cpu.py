"""One program on the null device and on the CPU: what must not depend on the device.

``examples/llama`` is captured as one rank of each layout on both. The sequence of communications
(operation, bytes, ranks of the group, peer) must be the same from the first node on, and so must
the bytes of parameters and of the optimizer's state (``llama_state.py`` says them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.capture.launcher import CaptureRunner
from prismscale.cluster import Cluster
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.validation.rows import Row

PROGRAM = Path(__file__).with_name("llama_state.py")
WORLD_SIZE = 4
RANK = 3
LAYOUTS = {
    "DDP": "--dp-mode ddp",
    "FSDP2": "--dp-mode fsdp2",
    "TP 2, FSDP2": "--tp 2 --sequence-parallel",
    "PP 2, FSDP2": "--pp 2 --microbatches 4",
}
Communication = tuple[str, int, tuple[int, ...], int]
"""Operation, bytes, ranks of the group, peer or root relative to this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """One rank of the program on one device."""

    trace: RankTrace
    parameter_bytes: int
    optimizer_bytes: int


def against_cpu_rows(folder: Path) -> Iterator[Row]:
    """Differences of each layout; every one must be 0. Captures go to ``folder``."""
    for layout, options in LAYOUTS.items():
        null, cpu = (
            _capture(folder / layout / device, device, options) for device in ("null", "cpu")
        )
        length, differing = _compare(null.trace, cpu.trace)
        yield Row.at_most(
            f"llama, {layout}: {length} communications on null and cpu, differing", differing, 0
        )
        for what, ours, theirs in (
            ("parameters", null.parameter_bytes, cpu.parameter_bytes),
            ("optimizer", null.optimizer_bytes, cpu.optimizer_bytes),
        ):
            name = f"llama, {layout}: {what}, {theirs:,} bytes on cpu, difference on null"
            yield Row.at_most(name, abs(ours - theirs), 0, "bytes")


def _capture(out: Path, device: str, options: str) -> Captured:
    gpu = Cluster.load("h100-sxm").device
    out.mkdir(parents=True)
    spec = CaptureSpec(
        rank=RANK,
        world_size=WORLD_SIZE,
        local_world_size=WORLD_SIZE,
        target=str(PROGRAM),
        is_module=False,
        args=("--clip-grad", "1", "--steps", "20", *options.split()),
        device=device,
        samples=1,
        step_marker=None,
        track_memory=False,
        communication_load=False,
        payloads=str(out / "payloads"),
        out=str(out),
        gpu=gpu,
    )
    runner = CaptureRunner(spec=spec, logs=out)
    runner.capture([RANK])
    log = (out / f"capture-rank-{RANK}.log").read_text(encoding="utf-8")
    said = [line.split() for line in log.splitlines() if line.startswith("state ")]
    _, parameter_bytes, optimizer_bytes = said[-1]
    return Captured(
        trace=runner.traces[RANK],
        parameter_bytes=int(parameter_bytes),
        optimizer_bytes=int(optimizer_bytes),
    )


def _compare(one: RankTrace, other: RankTrace) -> tuple[int, int]:
    """Communications of the longer recording with one more step, and places where they differ.

    The null device settles in fewer steps, so that its prologue ends earlier.
    """
    length = max(sum(map(len, _recorded(trace))) for trace in (one, other))
    unrolled = [
        islice(chain(prologue, cycle(body)), length)
        for prologue, body in (_recorded(one), _recorded(other))
    ]
    return length, sum(mine != its for mine, its in zip_longest(*unrolled))


def _recorded(trace: RankTrace) -> tuple[list[Communication], list[Communication]]:
    """Communications of the prologue and of one steady step."""
    return (
        [_communication(trace, node) for node in trace.communications(0, trace.n_prologue)],
        [
            _communication(trace, node)
            for node in trace.communications(trace.n_prologue, trace.n_nodes)
        ],
    )


def _communication(trace: RankTrace, node: int) -> Communication:
    op = CollectiveOp(int(trace.op_N[node])).spelling
    ranks = trace.groups[int(trace.group_index_N[node])].ranks
    return op, int(trace.bytes_N[node]), ranks, int(trace.peer_N[node])
