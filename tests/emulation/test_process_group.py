"""The emulated process group: records, values, objects and queries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from prismscale.errors import UsageError
from support.emulation import (
    all_gather_single,
    communicate_everything,
    emulated,
    reduce_scatter_single,
)

X4 = 16
"""Bytes of four fp32 values."""


def _x(numel: int = 4) -> torch.Tensor:
    return torch.ones(numel)


def _list(n: int = 4) -> list[torch.Tensor]:
    return [_x() for _ in range(n)]


ENTRY_POINTS: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    # name: (the program's call on rank 1 of 4, op, bytes, root)
    "all_reduce": (lambda: dist.all_reduce(_x()), "all_reduce", X4, -1),
    "all_gather": (lambda: dist.all_gather(_list(), _x()), "all_gather", 4 * X4, -1),
    "all_gather_single": (
        lambda: all_gather_single(_x(16), _x()),
        "all_gather",
        4 * X4,
        -1,
    ),
    "reduce_scatter": (lambda: dist.reduce_scatter(_x(), _list()), "reduce_scatter", 4 * X4, -1),
    "reduce_scatter_single": (
        lambda: reduce_scatter_single(_x(), _x(16)),
        "reduce_scatter",
        4 * X4,
        -1,
    ),
    "broadcast": (lambda: dist.broadcast(_x(), src=2), "broadcast", X4, 2),
    "reduce": (lambda: dist.reduce(_x(), dst=3), "reduce", X4, 3),
    "gather to a peer": (lambda: dist.gather(_x(), None, dst=0), "gather", 4 * X4, 0),
    "gather here": (lambda: dist.gather(_x(), _list(), dst=1), "gather", 4 * X4, 1),
    "scatter from a peer": (lambda: dist.scatter(_x(), None, src=0), "scatter", 4 * X4, 0),
    "scatter from here": (lambda: dist.scatter(_x(), _list(), src=1), "scatter", 4 * X4, 1),
    "all_to_all": (lambda: dist.all_to_all(_list(), _list()), "all_to_all", 4 * X4, -1),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(_x(16), _x(16)),
        "all_to_all",
        4 * X4,
        -1,
    ),
    "send": (lambda: dist.send(_x(), dst=2), "send", X4, 2),
    "recv": (lambda: dist.recv(_x(), src=0), "recv", X4, 0),
    "barrier": (lambda: dist.barrier(), "barrier", 0, -1),
    "monitored_barrier": (lambda: dist.monitored_barrier(), "barrier", 0, -1),
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_becomes_one_record(name: str) -> None:
    """Each call of torch.distributed is one Collective with its operation, bytes and root."""
    call, op, n_bytes, root = ENTRY_POINTS[name]
    with emulated() as hook:
        call()
        assert len(hook.batches) == 1
        record = hook.last
        assert (record.op.spelling, record.n_bytes, record.root) == (op, n_bytes, root)


def test_values_equal_a_real_gloo_run(tmp_path: Path) -> None:
    """Where all ranks contribute the same, every collective gives what two gloo ranks give."""
    script = Path(__file__).parents[1] / "support" / "gloo_reference.py"
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [[str(rank), str(tmp_path / "store"), str(outs[rank])] for rank in range(2)]
    workers = [
        subprocess.Popen([sys.executable, str(script), *given], env=environment)
        for given in arguments
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    for rank in range(2):
        with emulated(rank, 2):
            ours = communicate_everything(2, rank)
        assert ours == json.loads(outs[rank].read_text())


def test_reduction_is_recorded() -> None:
    """The record carries the reduction the program asked for."""
    with emulated() as hook:
        dist.all_reduce(_x(), op=dist.ReduceOp.MAX)
        assert hook.last.reduce_op == dist.ReduceOp.MAX


def test_uneven_splits_are_recorded() -> None:
    """Splits of an uneven all_to_all are rows for each member, in group order."""
    with emulated() as hook:
        dist.all_to_all_single(_x(10), _x(6), [1, 2, 3, 4], [0, 3, 2, 1])
        assert tuple(hook.last.output_splits) == (1, 2, 3, 4)
        assert tuple(hook.last.input_splits) == (0, 3, 2, 1)
        assert hook.last.n_bytes == 40


@pytest.mark.parametrize("asynchronous", [False, True])
def test_splits_may_be_arrays(asynchronous: bool) -> None:
    """Megatron keeps its splits in arrays; each member's rows are those they name."""
    with emulated() as hook:
        rows, output = np.array([1, 2, 3, 4]), _x(10)
        work = dist.all_to_all_single(output, _x(10), rows, rows, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert tuple(hook.last.input_splits) == (1, 2, 3, 4)
        assert all(type(split) is int for split in hook.last.output_splits)


def test_tracing_a_constant_is_no_communication() -> None:
    """A compiled function that reduces a number it made itself communicates once a call."""

    @torch.compile(backend="aot_eager")
    def widest(x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([x.shape[0]])
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        return x * rows

    with emulated() as hook:
        for _ in range(3):
            assert torch.equal(widest(_x()), 4 * _x())
        assert len(hook.batches) == 3


def test_roots_are_group_ranks() -> None:
    """A root or peer given as a global rank is recorded as its position in the group."""
    with emulated(5, 8) as hook:
        group = dist.new_group([1, 5, 7])
        dist.broadcast(_x(), src=7, group=group)
        dist.send(_x(), dst=1, group=group)
        dist.send(_x(), group_dst=2, group=group)
        assert [record.root for record in hook.collectives] == [2, 0, 2]
        assert hook.last.group.ranks == (1, 5, 7)
        assert hook.last.group.group_rank == 1


def test_recv_from_anyone_names_the_member_before() -> None:
    """A receive without a source answers a rank that could have sent."""
    with emulated(0, 4):
        assert dist.recv(_x()) == 3


def test_coalesced_calls_are_one_record() -> None:
    """Collectives in a coalescing block become one record with summed bytes."""
    with emulated() as hook:
        with distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for _ in range(3):
                dist.all_reduce(_x())
        manager.wait()
        assert len(hook.batches) == 1
        assert (len(hook.last.inputs), hook.last.n_bytes) == (3, 3 * X4)


def test_coalesced_gather_and_scatter_keep_flat_tensors() -> None:
    """Coalesced flat gathers and scatters keep one flat tensor for each call."""
    with emulated() as hook:
        with distributed_c10d._coalescing_manager():
            for _ in range(2):
                all_gather_single(_x(16), _x())
        with distributed_c10d._coalescing_manager():
            for _ in range(2):
                reduce_scatter_single(_x(), _x(16))
        counts = [(len(r.inputs), len(r.outputs), r.n_bytes) for r in hook.collectives]
        assert counts == [(2, 2, 8 * X4)] * 2


def test_old_style_coalescing_merges_broadcasts() -> None:
    """Calls between start and end of a device's coalescing window are issued together."""
    with emulated() as hook:
        with distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True):
            for _ in range(2):
                dist.broadcast(_x(), src=0)
        assert [len(batch) for batch in hook.batches] == [1]
        assert hook.last.n_bytes == 2 * X4


@pytest.mark.parametrize(("backend", "batches"), [("cpu:nccl,cuda:nccl", [2]), ("gloo", [1, 1])])
def test_p2p_batches_are_those_of_the_backend(backend: str, batches: list[int]) -> None:
    """batch_isend_irecv is one batch where the backend coalesces, separate records elsewhere."""
    with emulated(backend=backend) as hook:
        operations = [dist.P2POp(dist.isend, _x(), 2), dist.P2POp(dist.irecv, _x(), 0)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert [len(batch) for batch in hook.batches] == batches
        assert [record.op.spelling for record in hook.collectives] == ["send", "recv"]


def test_functional_collectives_reach_the_hook() -> None:
    """torch.ops._c10d_functional is answered from C++ and completes in wait_tensor."""
    ops = torch.ops._c10d_functional
    with emulated() as hook:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(_x(), 4, name))
        scattered = ops.wait_tensor(ops.reduce_scatter_tensor(_x(16), "sum", 4, name))
        exchanged = ops.wait_tensor(ops.all_to_all_single(_x(16), [4] * 4, [4] * 4, name))
        assert (gathered.numel(), exchanged.numel()) == (16, 16)
        assert scattered.tolist() == [4.0] * 4
        assert len(hook.n_issued_at_wait) == 3


def test_functional_autograd_flows_through() -> None:
    """The differentiable functional collectives have their backward communication."""
    import torch.distributed._functional_collectives as functional

    with emulated() as hook:
        x = _x().requires_grad_()
        group = dist.group.WORLD
        gather: Any = getattr(functional, "all_gather_single_autograd", None)
        gather = gather or functional.all_gather_tensor_autograd  # until torch 2.12
        # torch 2.11 wants gradients whose elements lie apart; those of a bare sum do not.
        (gather(x, 0, group) * torch.ones(16)).sum().backward()
        assert [r.op.spelling for r in hook.collectives] == ["all_gather", "reduce_scatter"]
        assert x.grad is not None
        assert x.grad.tolist() == [4.0] * 4


def test_objects_gather_as_mirrors() -> None:
    """Object gathers hold this rank's object in each place."""
    with emulated():
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, {"rank": 1})
        here: list[Any] = [None] * 4
        dist.gather_object("x", here, dst=1)
        assert everyone == [{"rank": 1}] * 4
        assert here == ["x"] * 4


def test_object_broadcast_from_here_and_from_a_peer() -> None:
    """Without a recording, an absent root's objects are those this rank passed in."""
    with emulated():
        objects = [{"seed": 1}, "b"]
        dist.broadcast_object_list(objects, src=1)
        dist.broadcast_object_list(objects, src=0)
        assert objects == [{"seed": 1}, "b"]


def test_object_scatter_from_a_peer_answers_the_last_gather() -> None:
    """A coordinator that is not here answers each rank with what that rank had given it."""
    with emulated():
        dist.gather_object({"plan": 3}, None, dst=0)
        output: list[Any] = [None]
        dist.scatter_object_list(output, None, src=0)
        assert output == [{"plan": 3}]


def test_object_receive_from_a_peer_is_refused_with_its_line() -> None:
    """Objects that only an absent rank knows are an error that names the call."""
    with emulated(), pytest.raises(UsageError, match=r"emulation\.py|test_process_group\.py"):
        dist.recv_object_list([None], src=0)


def test_queries_answer_as_the_backend_would() -> None:
    """Names, descriptions, options and capabilities of a group are those of its backend."""
    with emulated(backend="nccl"):
        world: Any = dist.group.WORLD
        backend = world._get_backend(torch.device("cuda"))
        assert (world.name(), world.group_name, world.group_desc) == ("nccl", "0", "default_pg")
        assert (backend.supports_coalescing, backend.supports_splitting) == (True, True)
        assert isinstance(backend.options, c10d.Backend.Options)
        assert torch.device("cuda") in world._device_types
        world._set_sequence_number_for_group()
        dist.all_reduce(_x())
        assert world._get_sequence_number_for_group() == 1


def test_a_backends_own_methods_reach_the_group() -> None:
    """Communications called on the backend object are the group's."""
    with emulated() as hook:
        world: Any = dist.group.WORLD
        world._get_backend(torch.device("cpu")).allreduce([_x()]).wait()
        assert hook.last.op.spelling == "all_reduce"


def test_old_overloads_are_understood() -> None:
    """Plain-argument overloads of the process group's methods give the same records."""
    with emulated() as hook:
        world: Any = dist.group.WORLD
        world.allreduce(_x(), dist.ReduceOp.MIN).wait()
        world.broadcast(_x(), root=3).wait()
        world.allgather(_list(), _x()).wait()
        world.reduce(_x(), 2).wait()
        assert hook.batches[0][0].reduce_op == dist.ReduceOp.MIN
        assert [r.root for r in hook.collectives] == [-1, 3, -1, 2]


class NotedOptions:
    """Options of an all_reduce that note when they are first read."""

    asyncOp = True

    def __init__(self) -> None:
        self.read_ns = 0

    @property
    def reduceOp(self) -> Any:
        self.read_ns = perf_counter_ns()
        return dist.ReduceOp.SUM


def test_a_call_is_when_the_program_entered() -> None:
    """Making the record is the emulation's work: the call's moment comes before all of it."""
    with emulated() as hook:
        world: Any = dist.group.WORLD
        options, before_ns = NotedOptions(), perf_counter_ns()
        world.allreduce([_x()], options)
        assert before_ns < hook.last.called_ns < options.read_ns


def test_a_batch_is_called_when_its_window_closes() -> None:
    """Coalesced calls are answered at the end of their window; until then the program runs."""
    with emulated() as hook:
        with distributed_c10d._coalescing_manager(async_ops=True):
            dist.all_reduce(_x())
            inside_ns = perf_counter_ns()
        assert inside_ns < hook.last.called_ns < perf_counter_ns()


def test_debug_detail_needs_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares peers' calls, does not get in the way."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with emulated() as hook:
            dist.all_reduce(_x())
            assert len(hook.batches) == 1
    finally:
        dist.set_debug_level(level)
