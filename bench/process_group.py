"""What the emulated process group costs for each communication, with a hook that does nothing.

Every entry point is called on the process group itself, as ``torch.distributed`` and DDP call it,
and waited for. The time is the best of several rounds, so that other load on the machine does not
count. Entry points that take one tensor (or, where the call outlives its arguments, one number) for
each member cost what these cost to read, so their rows also say how many a call carries.

The share of a step is what the emulation adds to a step's communications (each at the cost of a
functional all_reduce, the dearest of a program's calls, less what the same call costs on torch's
own process group that does nothing) over the computation of that step as captured.

Usage: ``python bench/process_group.py [--json PATH]``
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import distributed as dist
from torch.distributed import Work, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from fidelity_gloo import CASES, capture
from prismscale.api import load
from prismscale.emulation.hook import Collective
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.emulation.work import completed
from prismscale.payload.absent_peers import absent_peers
from prismscale.validation.rows import Row, finish

BAR_US = 50.0
BAR_SHARE = 1.0
MODEL = ["--model", "tiny", "--steps", "100000", "--log-every", "1000"]
GROUP_SIZES = (2, 8_192)
N_ROUNDS = 15
N_COALESCED = 4


class _NullHook:
    """Completes at once and leaves outputs as they are."""

    def communicate(self, batch: Sequence[Collective]) -> Work:
        return completed(batch[0].outputs)


def flat_calls(group: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Entry points whose cost must not depend on the group's size, by name."""
    x, y = torch.ones(4), torch.ones(4)
    wide = torch.ones(4 * size)
    splits = [4] * size
    xs, wides = [x] * N_COALESCED, [wide] * N_COALESCED
    cpu = torch.device("cpu")
    reduce_opts, broadcast_opts = dist.AllreduceOptions(), dist.BroadcastOptions()
    scatter_opts, gather_opts = dist.ReduceScatterOptions(), distributed_c10d.AllgatherOptions()
    rooted, blocking = dist.ReduceOptions(), dist.AllToAllOptions()
    blocking.asyncOp = False

    def batched() -> Any:
        group._start_coalescing(cpu)
        group.send([x], 1, 0)
        group.recv([y], 1, 0)
        return group._end_coalescing(cpu)

    return {
        "allreduce": lambda: group.allreduce([x], reduce_opts),
        "allreduce_coalesced": lambda: group.allreduce_coalesced(xs, reduce_opts),
        "broadcast": lambda: group.broadcast([x], broadcast_opts),
        "reduce": lambda: group.reduce([x], rooted),
        "all_gather_single": lambda: group.all_gather_single(wide, x, gather_opts),
        "all_gather_single_coalesced": lambda: group.all_gather_single_coalesced(
            wides, xs, gather_opts
        ),
        "reduce_scatter_single": lambda: group.reduce_scatter_single(x, wide, scatter_opts),
        "reduce_scatter_single_coalesced": lambda: group.reduce_scatter_single_coalesced(
            xs, wides, scatter_opts
        ),
        "all_to_all_single": lambda: group.all_to_all_single(wide, wide, [], []),
        "all_to_all_single, uneven": lambda: group.all_to_all_single(
            wide, wide, splits, splits, blocking
        ),
        "send": lambda: group.send([x], 1, 0),
        "recv": lambda: group.recv([y], 1, 0),
        "batch of send and recv": batched,
        "barrier": group.barrier,
    }


def listed_calls(group: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Entry points that take one tensor for each member, by name."""
    x = torch.ones(4)
    each = [x] * size
    wide, splits = torch.ones(4 * size), [4] * size
    return {
        "all_to_all_single, uneven, kept": lambda: group.all_to_all_single(
            wide, wide, splits, splits
        ),
        "allgather": lambda: group.allgather([each], [x]),
        "reduce_scatter": lambda: group.reduce_scatter([x], [each]),
        "gather": lambda: group.gather([each], [x]),
        "scatter": lambda: group.scatter([x], [each]),
        "alltoall": lambda: group.alltoall(each, each),
    }


def program_calls(group: Any, size: int) -> dict[str, Callable[[], Any]]:
    """The whole path of a program's call, torch's own Python included, by name."""
    x, wide = torch.ones(4), torch.ones(4 * size)
    functional = torch.ops._c10d_functional
    name = group.group_name
    return {
        "dist.all_reduce": lambda: dist.all_reduce(x, group=group, async_op=True),
        "dist.all_gather_single": lambda: dist.all_gather_single(
            wide, x, group=group, async_op=True
        ),
        "functional all_reduce": lambda: _Waited(functional.all_reduce(x, "sum", name)),
    }


class _Waited:
    """Gives a functional collective's tensor the ``wait`` of a Work."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        torch.ops._c10d_functional.wait_tensor(self._tensor)


def best_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call and its wait, best of :data:`N_ROUNDS` rounds."""
    call().wait()
    start = time.perf_counter()
    call().wait()
    n_calls = max(1, min(200, int(2e-3 / (time.perf_counter() - start))))
    rounds = []
    for _ in range(N_ROUNDS):
        start = time.perf_counter()
        for _ in range(n_calls):
            call().wait()
        rounds.append((time.perf_counter() - start) / n_calls)
    return min(rounds) * 1e6


def measure() -> list[Row]:
    """One row for each entry point and group size."""
    rows = []
    for size in GROUP_SIZES:
        with absent_peers(
            RankEnvironment(rank=0, world_size=size, local_world_size=2), _NullHook()
        ):
            dist.init_process_group("gloo")
            group = dist.group.WORLD
            for calls, n_tensors in (
                (flat_calls, 1), (program_calls, 1), (listed_calls, size)
            ):  # fmt: skip
                for name, call in calls(group, size).items():
                    value = best_us(call)
                    listed = f", {n_tensors} items" if n_tensors > 1 else ""
                    what = f"{name}, group of {size}{listed}"
                    if n_tensors <= GROUP_SIZES[0]:
                        rows.append(Row.at_most(what, value, BAR_US, "us"))
                    else:
                        rows.append(Row.told(what, value, "us"))
    return rows


def torch_alone_us() -> float:
    """Microseconds of a functional all_reduce on torch's fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        return best_us(program_calls(group, 2)["functional all_reduce"])
    finally:
        dist.destroy_process_group()


def shares_of_step(call_us: float) -> list[Row]:
    """Per cent of a step of the llama example that its communications cost, by parallelism."""
    rows = []
    for case, args in CASES.items():
        with tempfile.TemporaryDirectory(prefix="process-group-") as name:
            capture([*MODEL, *args], "loopback-gloo", Path(name) / "run")
            trace = load(Path(name) / "run").trace(0)
        step_us = float(np.median(trace.compute_ns_S)) / 1e3
        n_communications = len(list(trace.communications(trace.n_prologue, trace.n_nodes)))
        value = 100 * n_communications * call_us / step_us
        what = f"share of a step, llama {case}, {n_communications} communications"
        rows.append(Row.at_most(what, value, BAR_SHARE, "%"))
    return rows


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    """Measure, print a table, and write the rows where asked."""
    rows = measure()
    alone_us = torch_alone_us()
    rows.append(Row.told("functional all_reduce, torch's fake process group of 2", alone_us, "us"))
    program = [r.value for r in rows if r.name.startswith("functional all_reduce, group")]
    rows += shares_of_step(max(program) - alone_us)
    title = "Emulated process group: time of one communication"
    sys.exit(finish(rows, title=title, json_path=json_path))


if __name__ == "__main__":
    typer.run(main)
