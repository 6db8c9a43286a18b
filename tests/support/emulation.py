"""Emulated ranks for tests: a hook that records, and the program's view of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.emulation.work import EmulatedWork
from prismscale.graph.node import CollectiveOp
from prismscale.payload.absent_peers import absent_peers
from prismscale.payload.mirror import MirrorPayload, PayloadSource
from prismscale.torch_versions import renamed

all_gather_single = renamed(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")


def all_reduce(group: GroupHandle, *, asynchronous: bool = False, called_ns: int = 0) -> Collective:
    """An all-reduce of one float, normalised."""
    tensors = (torch.ones(1),)
    return Collective(
        op=CollectiveOp.ALL_REDUCE,
        group=group,
        inputs=tensors,
        outputs=tensors,
        n_bytes=4,
        asynchronous=asynchronous,
        called_ns=called_ns,
    )


class RecordingHook:
    """Keeps every batch, fills outputs at once, and completes when waited for."""

    def __init__(self, payload: PayloadSource | None = None) -> None:
        self._payload = payload or MirrorPayload()
        self.batches: list[tuple[Collective, ...]] = []
        self.n_issued_at_wait: list[int] = []
        """For each wait, in order, how many batches had been issued by then."""

    def communicate(self, batch: Sequence[Collective]) -> EmulatedWork:
        """Record and fill."""
        self.batches.append(tuple(batch))
        for collective in batch:
            self._payload.fill(collective)
        return EmulatedWork([t for c in batch for t in c.outputs], self._waited)

    def _waited(self, timeout: timedelta | None) -> None:
        self.n_issued_at_wait.append(len(self.batches))

    @property
    def collectives(self) -> list[Collective]:
        """All communications in order."""
        return [collective for batch in self.batches for collective in batch]

    @property
    def last(self) -> Collective:
        """The latest communication."""
        return self.batches[-1][-1]


class GroupLog:
    """Keeps what it is told about groups."""

    def __init__(self) -> None:
        self.created: list[tuple[tuple[int, ...], str, str, int | None]] = []

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Note a group."""
        self.created.append((ranks, name, backend, group_index))


@contextmanager
def emulated(
    rank: int = 1,
    world_size: int = 4,
    backend: str | None = "gloo",
    *,
    payload: PayloadSource | None = None,
    observer: GroupLog | None = None,
) -> Iterator[RecordingHook]:
    """The default group of one rank, initialised; yields the hook that answers it."""
    hook = RecordingHook(payload)
    with absent_peers(RankEnvironment(rank=rank, world_size=world_size), hook, observer):
        dist.init_process_group(backend)
        yield hook


def communicate_everything(size: int, rank: int) -> dict[str, list[float]]:
    """Every collective on data that is the same on all ranks, by name: the flattened outputs."""
    results: dict[str, list[float]] = {}

    def note(name: str, *outputs: torch.Tensor) -> None:
        results[name] = [float(x) for output in outputs for x in output.flatten()]

    def data(*shape: int) -> torch.Tensor:
        return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)

    for op in ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
        tensor = data(3).long() if op.startswith("B") else data(3)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        note(f"all_reduce {op}", tensor)
    _gathers(size, data, note)
    _scatters(size, data, note)
    _rooted(size, rank, data, note)
    return results


Data = Callable[..., torch.Tensor]
Note = Callable[..., None]


def _gathers(size: int, data: Data, note: Note) -> None:
    outputs = [torch.empty(2) for _ in range(size)]
    dist.all_gather(outputs, data(2))
    note("all_gather", *outputs)
    flat = torch.empty(2 * size)
    all_gather_single(flat, data(2))
    note("all_gather_single", flat)
    rows = torch.empty(2 * size, 3)
    all_gather_single(rows, data(2, 3))
    note("all_gather_single, rows", rows)
    pickled = [None] * size
    dist.all_gather_object(pickled, {"a": 7})
    note("all_gather_object", torch.tensor([item["a"] for item in pickled]))  # type: ignore[index]


def _scatters(size: int, data: Data, note: Note) -> None:
    output = torch.empty(2)
    dist.reduce_scatter(output, [torch.ones(2) * 3 for _ in range(size)])
    note("reduce_scatter", output)
    output = torch.empty(2)
    reduce_scatter_single(output, torch.ones(2 * size) * 5)
    note("reduce_scatter_single", output)
    output = torch.empty(2 * size)
    dist.all_to_all_single(output, torch.ones(2 * size) * 6)
    note("all_to_all_single", output)
    output = torch.empty(3 * size, 2)
    dist.all_to_all_single(output, torch.ones(3 * size, 2), [3] * size, [3] * size)
    note("all_to_all_single, splits", output)


def _rooted(size: int, rank: int, data: Data, note: Note) -> None:
    tensor = data(4)
    dist.broadcast(tensor, src=0)
    note("broadcast", tensor)
    tensor = data(4)
    dist.reduce(tensor, dst=1)
    if rank == 1:
        note("reduce", tensor)
    outputs = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(data(2), outputs, dst=1)
    if outputs is not None:
        note("gather", *outputs)
    output = torch.empty(2)
    dist.scatter(output, [data(2)] * size if rank == 1 else None, src=1)
    if rank == 1:
        note("scatter", output)
