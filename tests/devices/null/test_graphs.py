"""CUDA graphs: what a replay takes, launches and communicates, against the same program eager."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.capture.node_stream import NodeStream
from prismscale.capture.recorder import Recorder
from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.launch_log import costs, recost
from prismscale.devices.null.device import NullDevice
from prismscale.devices.null.graphs.null_graph import NullGraph
from prismscale.devices.null.kernel_ledger import KernelLedger
from prismscale.devices.null.launch_reader import launch_log
from prismscale.devices.null.runtime import active
from prismscale.emulation.hook import Collective
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.graph.node import NodeKind
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload
from support.cuda_graphs import capture
from support.device_time import device_ns
from support.emulation import emulated
from support.op_log import OpSignature, drain_ops, record_ops, set_cost_model

NOT_CAPTURED = "without a preceding successful capture|must have been called before calling"
LAUNCH_NS = 700
"""What the host pays for one launch here."""


def cost(signature: OpSignature) -> tuple[int, int]:
    """Device time by the number of elements; nothing for the host but the launch of a graph."""
    if signature.name == "cuda::graph_launch":
        return 0, LAUNCH_NS
    return 100 + sum(t.shape[0] for t in signature.outputs if t.shape), 0


@pytest.fixture(autouse=True)
def costed() -> Iterator[None]:
    torch.cuda.set_stream(torch.cuda.default_stream())
    set_cost_model(cost)
    yield
    set_cost_model(None)
    record_ops(False)
    drain_ops()


def host_ns(run: Callable[[], object]) -> int:
    """Logical time of the host."""
    library = active().library
    before = library.ps_host_time_ns()
    run()
    return int(library.ps_host_time_ns() - before)


N_SIDES = 3


@cache
def streams_apart() -> list[torch.cuda.Stream]:
    """torch.cuda.Stream() gives each of 32 again and again; these are different ones."""
    return [torch.cuda.Stream() for _ in range(1 + N_SIDES)]


WORK = st.tuples(st.just("work"), st.integers(0, N_SIDES), st.integers(1, 900))
WAIT = st.tuples(st.just("wait"), st.integers(0, N_SIDES), st.integers(0, N_SIDES))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(WORK, WORK, WAIT), max_size=25).map(lambda s: [*s, ("work", 0, 1)]))
def test_a_replay_takes_the_device_as_long_as_its_launches(steps) -> None:
    """Issued again at once, with their dependencies; the host, one launch."""
    tensors = {n: torch.empty(n, device="cuda") for _, _, n in steps}
    own, *sides = streams_apart()

    def program() -> None:
        streams = [torch.cuda.current_stream(), *sides]
        for side in sides:
            side.wait_stream(streams[0])
        for kind, at, other in steps:
            if kind == "wait":
                streams[at].wait_stream(streams[other])
                continue
            with torch.cuda.stream(streams[at]):
                tensors[other].neg_()
        for side in sides:
            streams[0].wait_stream(side)

    eager_ns = device_ns(program)
    graph = capture(program, stream=own)
    assert device_ns(graph.replay) == eager_ns + LAUNCH_NS
    assert host_ns(graph.replay) == LAUNCH_NS
    assert device_ns(lambda: [graph.replay() for _ in range(3)]) == max(
        3 * eager_ns + LAUNCH_NS, eager_ns + 3 * LAUNCH_NS
    )


def test_capturing_takes_no_device_time_and_counts_no_kernel() -> None:
    """The host pays what each call costs it; replays count the kernels."""
    tensor = torch.ones(64, device="cuda")
    set_cost_model(lambda _: (1000, 30))
    record_ops()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    before_ns = active().library.ps_stream_time_ns(0, stream.stream_id)
    with torch.cuda.graph(graph, stream=stream):
        assert host_ns(lambda: tensor.neg_().sigmoid_()) == 60
    assert active().library.ps_stream_time_ns(0, stream.stream_id) == before_ns
    drain_ops()
    graph.replay()
    graph.replay()
    names = [op.signature.name for op in drain_ops()]
    assert names == ["cuda::graph_launch", "aten::neg_", "aten::sigmoid_"] * 2


def layer() -> torch.nn.Module:
    blocks = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*blocks).cuda()


def calls(run: Callable[[], object]) -> Counter[str]:
    """How often each op runs."""
    record_ops()
    drain_ops()
    run()
    found = Counter(op.signature.name for op in drain_ops())
    record_ops(False)
    return found


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables_run_the_kernels_of_the_eager_module() -> None:
    """Forward and backward; beside them only what fills the static inputs."""
    eager, sample = layer(), torch.randn(8, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(
        layer(), (torch.randn(8, 64, device="cuda", requires_grad=True),)
    )

    def step(module: torch.nn.Module) -> None:
        module(sample).square().mean().backward()

    for module in (eager, graphed):
        step(module)
    ours, theirs = calls(lambda: step(graphed)), calls(lambda: step(eager))
    assert ours.pop("cuda::graph_launch") == 2
    kernels = {"aten::addmm", "aten::mm", "aten::sum.dim_IntList", "aten::threshold_backward"}
    assert {k: ours[k] for k in kernels} == {k: theirs[k] for k in kernels}
    assert all(p.grad is not None for p in graphed.parameters())


def test_a_step_in_a_graph_changes_no_memory() -> None:
    """The statistics of the allocator are those of before the replay."""
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    sample = torch.randn(8, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(sample).mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    graph = capture(step, stream=side)
    before = torch.cuda.memory_stats()
    graph.replay()
    assert torch.cuda.memory_stats() == before


def forbidden() -> dict[str, Callable[[], object]]:
    tensor = torch.ones(4, device="cuda")
    event = torch.cuda.Event()
    event.record()
    return {
        "synchronize": torch.cuda.synchronize,
        "stream.synchronize": lambda: torch.cuda.current_stream().synchronize(),
        "item": lambda: tensor.neg().sum().item(),
        "query": event.query,
        "event.synchronize": event.synchronize,
        "nonzero": tensor.nonzero,
        "other stream": lambda: torch.cuda.current_stream().wait_event(event),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("synchronize", "stream.synchronize", "item", "query", "event.synchronize", "nonzero"),
        "other stream",
    ],
)
def test_a_capture_forbids_what_cuda_forbids(name: str) -> None:
    """With CUDA's words; the device goes on afterwards."""
    call, graph = forbidden()[name], torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError) as error, torch.cuda.graph(graph):
        call()
    raised: BaseException | None = error.value
    words = []
    while raised is not None:
        words.append(str(raised).splitlines()[0])
        raised = raised.__context__
    expected = "operation not permitted when stream is capturing"
    if name == "other stream":
        expected = "dependency created on uncaptured work in another stream"
    assert words[-1] == f"CUDA error: {expected}"
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match=NOT_CAPTURED):
        graph.replay()
    torch.cuda.synchronize()


def test_copies_in_a_capture_need_pinned_memory() -> None:
    """Torch's own check; from pinned memory they are captured, where the host need not wait."""
    tensor, page = torch.ones(4, device="cuda"), torch.ones(4)
    for copy in (tensor.cpu, lambda: tensor.copy_(page)):
        with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
            capture(lambda call=copy: (tensor.neg_(), call()))  # type: ignore[misc]
        torch.cuda.set_stream(torch.cuda.default_stream())
    pinned = torch.ones(4, pin_memory=True)
    graph = capture(lambda: tensor.copy_(pinned, non_blocking=True))
    assert calls(graph.replay)["aten::copy_"] == 1


def test_relaxed_captures_may_ask_events() -> None:
    """As cudaStreamCaptureMode says."""
    event = torch.cuda.Event()
    event.record()
    tensor = torch.ones(4, device="cuda")
    capture(lambda: event.query() and tensor.neg_(), capture_error_mode="relaxed")


def test_a_stream_must_come_back() -> None:
    """Work on a stream that nobody waits for again is no part of a graph."""
    side, tensor = torch.cuda.Stream(), torch.ones(4, device="cuda")

    def forks() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.neg_()

    with pytest.raises(RuntimeError, match="unjoined work") as raised:
        capture(forks)
    (note,) = raised.value.__notes__
    assert "1 kernel or communication of another stream, whose last kernel is aten::neg_" in note


def test_misuse_is_named_as_torch_does() -> None:
    """Begin, end, replay and reset in the wrong order."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=NOT_CAPTURED):
        graph.replay()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with torch.cuda.graph(graph):
        torch.ones(4, device="cuda")
    with (
        pytest.raises(RuntimeError, match="already owns a captured graph"),
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        graph.capture_begin()
    graph.reset()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        torch.ones(4, device="cuda")
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()


def test_an_empty_capture_is_warned_about() -> None:
    """As torchtitan's first, of nothing."""
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"):
        capture(lambda: None)


def test_a_kept_graph_is_instantiated_later() -> None:
    """keep_graph, instantiate, raw handles."""
    tensor = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        tensor.neg_()
    assert isinstance(graph.raw_cuda_graph(), int)
    graph.instantiate()
    graph.replay()
    with pytest.raises(RuntimeError, match="keep_graph=true"):
        capture(tensor.neg_).raw_cuda_graph()


class Seen(MirrorPayload):
    """Notes each communication, its stream and how many kernels were launched before it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[object, ...]] = []

    def fill(self, collective: Collective) -> None:
        stream = "program's" if torch.cuda.current_stream().stream_id <= 64 else "branch"
        n_before = active().library.ps_op_rows()
        c = collective
        kind = (c.op, c.n_bytes, c.group.group_index, c.root, tuple(c.output_splits))
        self.log.append((*kind, n_before, stream))
        active().library.ps_without_cost(1)
        super().fill(collective)
        active().library.ps_without_cost(0)


def communicating(tensor: torch.Tensor) -> Callable[[], None]:
    """A program with several kinds of communication between its kernels."""
    shard = torch.empty(tensor.shape[0] // 4, device="cuda")

    def program() -> None:
        tensor.neg_()
        work = dist.all_reduce(tensor, async_op=True)
        tensor.abs()
        work.wait()
        dist.reduce_scatter_single(shard, tensor)
        shard.neg_()
        dist.all_gather_single(tensor, shard)
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, shard, 2), dist.P2POp(dist.irecv, shard, 0)]
        ):
            request.wait()
        dist.broadcast(shard, 0)

    return program


def test_each_replay_communicates_as_the_eager_program() -> None:
    """The same operations, bytes and peers, each after the same kernels; none at capture."""
    seen = Seen()
    with emulated(1, 4, "nccl", payload=seen):
        program = communicating(torch.empty(4096, device="cuda"))
        record_ops()
        program()
        eager, seen.log = seen.log, []
        graph = capture(program)
        assert seen.log == []
        for _ in range(2):
            drain_ops()
            graph.replay()
            replayed, seen.log = seen.log, []
            # The launch of the graph itself comes first.
            assert replayed == [(*kind, n + 1, at) for *kind, n, at in eager]


def test_a_communication_that_nobody_waits_for_is_unjoined_work() -> None:
    """As on NCCL's own stream; and barriers stop the host, so they cannot be captured."""
    with emulated(1, 4, "nccl"):
        tensor = torch.empty(64, device="cuda")
        held = []
        with pytest.raises(RuntimeError, match="unjoined work") as raised:
            capture(lambda: held.append(dist.all_reduce(tensor, async_op=True)))
        (note,) = raised.value.__notes__
        assert "1 communication that nobody waits for" in note
        assert re.search(r"all_reduce of .* at .*test_graphs.py:\d+", note)
        torch.cuda.set_stream(torch.cuda.default_stream())
        with pytest.raises(RuntimeError, match="previous error during capture"):
            capture(dist.barrier)
        torch.cuda.set_stream(torch.cuda.default_stream())


def recorded(launches: Callable[[Callable[[], None]], None]) -> NodeStream:
    """The nodes of a rank that runs the communicating program as ``launches`` does."""
    recorder = Recorder(NullDevice(active()), MirrorPayload())
    with absent_peers(RankEnvironment(rank=1, world_size=4), recorder, recorder):
        dist.init_process_group("nccl")
        launches(communicating(torch.empty(4096, device="cuda")))
        torch.cuda.synchronize()
    recorder.finish()
    return recorder.stream


def ends_ns(stream: NodeStream) -> int:
    """When the last node ends, with communications of 1,000 ns in the order of their lanes."""
    ends: list[int] = []
    for node in stream.nodes:
        is_work = node.kind == NodeKind.COMPUTE
        duration = node.ended - node.began if is_work else 1000
        ends.append(max((ends[p] for p in node.preds), default=0) + duration)
    return max(ends)


def test_a_recorded_replay_is_nodes_like_any_other() -> None:
    """The same communications from the same lines, and the same step, but for the launches."""
    eager = recorded(lambda program: [program() for _ in range(3)])

    def replays(program: Callable[[], None]) -> None:
        graph = capture(program)
        for _ in range(3):
            graph.replay()

    graphed = recorded(replays)

    def communications(stream: NodeStream) -> list[tuple[object, ...]]:
        lanes, sites = stream.lanes.all(), stream.sites.all()
        return [
            (n.op, n.n_bytes, n.group_index, n.peer, lanes[n.lane], sites[n.site])
            for n in stream.nodes
            if n.kind != NodeKind.COMPUTE
        ]

    assert communications(graphed) == communications(eager)
    assert LAUNCH_NS <= ends_ns(graphed) - ends_ns(eager) <= 3 * LAUNCH_NS


def test_the_launch_log_knows_replays() -> None:
    """Its costs give the durations of the recorded nodes; the ledger counts the kernels."""
    model = load_kernel_model("h100-sxm")
    ledger = KernelLedger(active(), model)
    stream = NodeStream()
    spans = NullDevice(active()).spans(stream, "forward")
    tensor = torch.ones(4096, 256, device="cuda")
    graph = capture(lambda: (tensor @ tensor.t()).relu().sum())
    tensor.neg_()
    ledger.optimizer_ended()
    for _ in range(3):
        graph.replay()
    ledger.optimizer_ended()
    spans.close()
    log = launch_log(active().library)
    stop = len(stream.nodes)
    log = log.for_trace(prologue_stop=stop, body_start=stop, body_stop=stop)
    took = [stream.nodes[n].ended - stream.nodes[n].began for n in log.node_N.tolist()]
    assert recost(log, *costs(log, model)).tolist() == took
    uses = {use.signature.partition("\x1f")[0]: use for use in ledger.uses(1, 2)}
    assert {name: use.calls for name, use in uses.items()} == dict.fromkeys(
        ("aten::mm", "aten::relu", "aten::sum", "cuda::graph_launch"), 3
    )
    assert uses["cuda::graph_launch"].host_ns == model.profile.host.launch_ns
    assert uses["cuda::graph_launch"].device_ns == 0


def test_generators_can_share_their_state() -> None:
    """As Megatron's tracker of graph-safe random states does."""
    mine, other = torch.Generator("cuda"), torch.Generator("cuda")
    mine.manual_seed(5)
    other.graphsafe_set_state(mine.graphsafe_get_state())
    mine.manual_seed(7)
    assert other.initial_seed() == 7
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(mine)


def test_debug_dump_says_how_much_is_in_it(tmp_path: Path) -> None:
    """Where torch asks C++ for it; since 2.15 it asks cuda.bindings."""
    tensor = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        tensor.neg_().abs_()
    NullGraph.debug_dump(graph, str(tmp_path / "graph.dot"))
    assert "2 launches" in (tmp_path / "graph.dot").read_text()
