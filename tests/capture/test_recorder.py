"""The recording hook: spans between communications, their edges, and the trace they become."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from prismscale.capture.recorder import Recorder, ordering
from prismscale.devices.cpu import CpuDevice
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.step_detection import watch_backward
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.host_comm.local_work import DurationCallback, LocalWork, NoWork, NullLoad
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload
from support.calls import call
from support.emulation import all_reduce
from support.recorded_steps import recorded_trace_of

WORLD = 4


class ManualDevice(CpuDevice):
    """A processor whose time passes when told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def mark(self, *lane: Any) -> int:
        """Now."""
        return self.now_ns


class Program:
    """Rank 1 of four, emulated; ``work`` is computation."""

    def __init__(self, backend: str = "nccl") -> None:
        self.device = ManualDevice()
        self.recorder = Recorder(self.device, MirrorPayload())
        self._environment = RankEnvironment(rank=1, world_size=WORLD)
        self._backend = backend

    def __enter__(self) -> Program:
        self._installed = absent_peers(self._environment, self.recorder, self.recorder)
        self._installed.__enter__()
        dist.init_process_group(self._backend)
        return self

    def __exit__(self, *error: Any) -> None:
        self._installed.__exit__(*error)

    def work(self, duration_ns: int) -> None:
        """Compute for a while."""
        self.device.now_ns += duration_ns

    def reduce(self, n: int = 2, **options: Any) -> Any:
        """All-reduce ``n`` floats."""
        return dist.all_reduce(torch.ones(n), **options)

    def spans(self) -> list[tuple[str, int]]:
        """Label and duration of each node so far, empty computation left out."""
        stream = self.recorder.stream
        names = stream.labels.all()
        seen = [(n, names[n.label], n.ended - n.began) for n in stream.nodes]
        return [(name, ns) for n, name, ns in seen if n.kind != NodeKind.COMPUTE or ns]

    def preds(self, position: int) -> set[int]:
        """Predecessors of a node."""
        return set(self.recorder.stream.nodes[position].preds)

    def calls(self) -> list[int]:
        """Positions of communications."""
        nodes = self.recorder.stream.nodes
        return [i for i, n in enumerate(nodes) if n.kind != NodeKind.COMPUTE]

    def trace(self, samples: int = 2) -> RankTrace:
        """What was recorded."""
        return recorded_trace_of(
            self.recorder, self.device, rank=1, world_size=WORLD, samples=samples
        )


def test_computation_between_communications_is_one_span() -> None:
    """With the communication where it was issued, and no time of its own."""
    with Program() as program:
        program.work(70)
        program.reduce()
        program.work(30)
        program.work(5)
        program.reduce()
    assert program.spans() == [
        ("forward", 70),
        ("all_reduce", 0),
        ("forward", 35),
        ("all_reduce", 0),
    ]


def test_what_follows_a_synchronous_call_waits_for_it() -> None:
    """The next span has the call and the span before it as predecessors."""
    with Program() as program:
        program.work(10)
        program.reduce()
        program.work(20)
        program.recorder.finish()
    (call,) = program.calls()
    assert program.preds(call) == {call - 1}
    assert call in program.preds(len(program.recorder.stream.nodes) - 1)


def test_an_asynchronous_call_is_waited_for_where_the_program_waits() -> None:
    """Computation in between overlaps with it."""
    with Program() as program:
        work = program.reduce(async_op=True)
        program.work(40)
        work.wait()
        program.work(60)
        program.recorder.finish()
    (call,) = program.calls()
    last = len(program.recorder.stream.nodes) - 1
    assert [ns for name, ns in program.spans() if name == "forward"] == [40, 60]
    assert call not in program.preds(last - 1)
    assert call in program.preds(last)


@dataclass
class LateShare(NoWork):
    """A share whose wait takes a while, and which remembers when it began."""

    waits_since_ns: int = 0

    def wait(self) -> None:
        """Wait."""
        self.waits_since_ns = perf_counter_ns()
        sleep(0.01)


@dataclass
class WorksHere(NullLoad):
    """A load whose work takes the program's core."""

    last: LateShare = field(default_factory=LateShare)
    interrupts = True

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """One that waits."""
        return self.last


PAIR = GroupHandle(group_index=0, ranks=(0, 1), group_rank=0, name="", backend="gloo")


def called(called_ns: int) -> Collective:
    """An asynchronous all-reduce, as the program called it."""
    return all_reduce(PAIR, asynchronous=True, called_ns=called_ns)


def test_computation_ends_when_the_program_calls() -> None:
    """What comes between the call and its record is the recorder's."""
    recorder = Recorder(CpuDevice(), MirrorPayload(), load=WorksHere())
    called_ns = perf_counter_ns()
    sleep(0.01)
    recorder.communicate([called(called_ns)])
    assert recorder.stream.nodes[0].ended == called_ns


def test_computation_ends_when_the_program_waits() -> None:
    """The wait itself, and what is noted of it, is no computation."""
    load = WorksHere()
    recorder = Recorder(CpuDevice(), MirrorPayload(), load=load)
    recorder.communicate([called(perf_counter_ns())]).wait()
    last = recorder.stream.nodes[-1]
    assert last.kind == NodeKind.COMPUTE
    assert last.began < last.ended <= load.last.waits_since_ns


def test_where_the_work_is_not_the_processors_computation_ends_at_its_mark() -> None:
    """A stream's marks are no readings of the monotonic clock."""
    device = ManualDevice()
    recorder = Recorder(device, MirrorPayload())
    device.now_ns += 70
    recorder.communicate([called(perf_counter_ns())])
    assert recorder.stream.nodes[0].ended == 70


def test_a_work_that_nobody_waits_for_holds_nobody_up() -> None:
    """As a send at the end of a stage."""
    with Program() as program:
        program.reduce(async_op=True)
        program.work(60)
        program.recorder.finish()
    (call,) = program.calls()
    assert all(call not in program.preds(i) for i in range(len(program.recorder.stream.nodes)))


@pytest.mark.parametrize(("backend", "behind"), [("nccl", 1), ("gloo", 2)])
def test_a_groups_communications_queue_as_the_backend_does(backend: str, behind: int) -> None:
    """NCCL runs one at a time on a group's stream, gloo two on its threads."""
    with Program(backend) as program:
        for _ in range(4):
            program.reduce(async_op=True)
    calls = program.calls()
    for before, after in zip(calls, calls[behind:], strict=False):
        assert before in program.preds(after)
    assert not set(calls) & program.preds(calls[behind - 1])


def test_groups_have_lanes_of_their_own() -> None:
    """Two groups' communications overlap; groups of others are known, too."""
    with Program() as program:
        own, _ = dist.new_group([0, 1]), dist.new_group([2, 3])
        program.reduce(async_op=True)
        program.reduce(async_op=True, group=own)
    first, second = (program.recorder.stream.nodes[i] for i in program.calls())
    assert (first.group_index, second.group_index) == (0, 1)
    assert first.lane != second.lane
    assert [g.ranks for g in program.recorder.groups] == [(0, 1, 2, 3), (0, 1)]
    assert (2, 3) in [g.ranks for g in program.recorder.known_groups]


def test_a_message_names_its_peer_by_distance() -> None:
    """Rank 1 to rank 3 and from rank 0: two ahead, three ahead around the group."""
    with Program() as program:
        dist.send(torch.ones(1), 3)
        dist.recv(torch.ones(1), 0)
    nodes = [program.recorder.stream.nodes[i] for i in program.calls()]
    assert [(n.kind, n.peer) for n in nodes] == [(NodeKind.SEND, 2), (NodeKind.RECV, 3)]


def test_a_call_site_is_this_line() -> None:
    """file:line of the user's program."""
    with Program() as program:
        program.reduce()
    (call,) = program.calls()
    site = program.recorder.stream.sites.all()[program.recorder.stream.nodes[call].site]
    assert "test_recorder.py:" in site


def test_phases_are_told_apart() -> None:
    """Backward passes by autograd, the optimizer by its hooks."""
    weight = torch.ones(2, requires_grad=True)
    with Program() as program, watch_backward(program.recorder):
        program.work(1)
        weight.register_hook(lambda grad: program.work(20))
        weight.sum().backward()
        program.work(3)
        program.recorder.optimizer_begins()
        program.work(400)
        program.recorder.optimizer_ended()
    expected = [("forward", 1), ("backward", 20), ("forward", 3), ("optimizer", 400)]
    assert program.spans() == expected


def test_gradients_that_a_layer_puts_off_are_backward_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformer Engine's store of them is imported before the first backward pass at the latest;
    what it was is put back."""

    class Store:
        def pop(self) -> int:
            program.work(20)
            return 7

    name = "transformer_engine.pytorch.module._common"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(WeightGradStore=Store))
    original = Store.pop
    with Program() as program, watch_backward(program.recorder):
        torch.ones(2, requires_grad=True).sum().backward()
        program.work(1)
        assert Store().pop() == 7
        program.work(3)
        program.recorder.optimizer_begins()
    assert program.spans() == [("forward", 1), ("backward", 20), ("forward", 3)]
    assert Store.pop is original


def by_the_engine(loss: torch.Tensor) -> None:
    """As Megatron's pipelines do, whose outputs hold no data any more."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


PASSES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "backward": lambda loss, weight: loss.backward(),
    "grad": torch.autograd.grad,
    "the engine": lambda loss, weight: by_the_engine(loss),
}


@pytest.mark.parametrize("how", PASSES)
def test_a_backward_pass_is_known_however_it_is_run(how: str) -> None:
    """Also one that runs another within it, as some kinds of checkpointing do."""
    weight = torch.ones(2, requires_grad=True)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                torch.ones(2, requires_grad=True).sum().backward()
            program.work(20)
            return grad.expand(2)

    with Program() as program, watch_backward(program.recorder):
        program.work(1)
        PASSES[how](Again.apply(weight), weight)
        program.work(3)
        program.recorder.finish()
    assert program.spans() == [("forward", 1), ("backward", 20), ("forward", 3)]


def test_what_happens_between_steps_is_not_the_programs_work() -> None:
    """After ``resume`` a span begins anew."""
    with Program() as program:
        program.work(5)
        program.recorder.optimizer_ended()
        program.work(1_000)
        program.recorder.resume()
        program.work(7)
        program.recorder.finish()
    assert [ns for _, ns in program.spans()] == [5, 7]


def steps(program: Program, durations: list[int], sizes: dict[int, int] | None = None) -> None:
    """One all-reduce and one optimizer call a step."""
    for step, duration in enumerate(durations):
        program.work(duration)
        program.reduce((sizes or {}).get(step, 2))
        program.recorder.optimizer_begins()
        program.work(1)
        program.recorder.optimizer_ended()


def test_a_trace_holds_every_sampled_step() -> None:
    """The last steps are the body's samples, the rest is the prologue."""
    with Program() as program:
        steps(program, [900, 100, 101, 102])
        trace = program.trace(samples=3)
    assert trace.body_ns_SB.sum(axis=1).tolist() == [101, 102, 103]
    assert int(trace.prologue_ns.sum()) == 901
    (call,) = trace.communications(trace.n_prologue, trace.n_nodes)
    assert (trace.op_N[call], trace.bytes_N[call]) == (CollectiveOp.ALL_REDUCE, 8)


def test_edges_reach_back_over_the_border_of_a_step() -> None:
    """The body's first span follows the last one of the step before."""
    with Program() as program:
        steps(program, [1] * 4)
        trace = program.trace()
    first = trace.n_prologue
    assert all(1 <= d <= trace.n_body for d in trace.predecessors(first).tolist())


def test_steps_of_equal_structure_have_equal_signatures() -> None:
    """Durations do not count, bytes do."""
    with Program() as program:
        steps(program, [5, 6, 7, 8], sizes={3: 4})
        signatures = program.recorder.stream.signatures
    assert signatures[1] == signatures[2] != signatures[3]


def test_lanes_follow_the_backend() -> None:
    """A single message of NCCL's has a stream of that pair; gloo keeps no order of messages."""
    message = call(2, torch.ones(1), op=CollectiveOp.SEND, root=1)
    assert ordering([message]) == ("group 0 p2p", 0)
    assert ordering([call(2, torch.ones(1))]) == ("group 0", 2)
