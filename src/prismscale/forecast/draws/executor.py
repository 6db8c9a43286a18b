"""Where chunks of draws are computed: in this process, in local processes, or on a Ray cluster.

Every executor runs one function over a list of tasks, with one shared object that each worker
receives once. A result depends on its task alone, so all executors give the same results bit for
bit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import psutil

from prismscale.errors import UsageError
from prismscale.processes.children import die_with_parent
from prismscale.processes.ray_cluster import connected_ray, first_done

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs a function over tasks."""

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        """Yield the results in the order of ``tasks``, as they become known.

        ``function`` must be importable by name: it is called in other processes.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Serial:
    """Runs tasks in this process, one after the other."""

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        return (function(shared, task) for task in tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalProcesses:
    """Runs tasks in up to ``workers`` new processes of this machine.

    Processes are started only where the remaining work is worth it. Memory must have room for each
    of them to grow as large as this process.
    """

    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    worth_s: float = 5.0
    """Remaining work after the first task from which on processes are started. Starting one costs
    time: it imports what the command imports."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers is {self.workers}; at least 1 is needed")

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        began = time.perf_counter()
        if tasks:
            # The first task runs here and tells how long the others will take.
            yield function(shared, tasks[0])
        rest = tasks[1:]
        work_s = (time.perf_counter() - began) * len(rest)
        count = min(self.workers, len(rest), _room())
        if count <= 1 or work_s < self.worth_s:
            yield from Serial().map(function, shared, rest)
            return
        others = set(multiprocessing.active_children())
        # Spawned, not forked: a fork copies locks, but not the threads that hold them.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(
            count, mp_context=context, initializer=_receive, initargs=(function, shared)
        )
        try:
            yield from pool.map(_run, rest)
        except BaseException:
            # A task may take a minute, and after Ctrl-C nobody needs its result.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _room() -> int:
    """Return how many processes as large as this one fit into the available memory.

    A worker holds the objects that this process shares with it, and draws as much at a time.
    """
    return int(psutil.virtual_memory().available // psutil.Process().memory_info().rss)


_received: tuple[Callable[[Any, Any], Any], Any]


def _receive(function: Callable[[Any, Any], Any], shared: Any) -> None:
    global _received
    # Ctrl-C reaches every process of the terminal. Workers ignore it: their parent ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    _received = (function, shared)


def _run(task: Any) -> Any:
    function, shared = _received
    return function(shared, task)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster:
    """Runs tasks on a Ray cluster.

    It needs ``pip install prismscale[ray]``, and prismscale installed on the cluster's nodes.
    """

    address: str | None = None
    """Address of a running cluster, or ``auto``. None starts one on this machine."""

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        """Yield the results in the order of ``tasks``.

        Raises:
            UsageError: Ray is not installed, or there is no cluster at the address.
        """
        with connected_ray(self.address) as ray:
            # One reference to the shared object serves all tasks: those that wait for a core hold
            # no data.
            reference = ray.put(shared)
            remote = ray.remote(function).options(scheduling_strategy="SPREAD")
            waiting = [remote.remote(reference, task) for task in tasks]
            for result in waiting:
                yield ray.get(first_done(ray, [result]))


def executor_named(
    name: str, *, workers: int | None = None, address: str | None = None
) -> Executor:
    """Return the executor that a command line asks for.

    Args:
        name: ``local``, ``serial`` or ``ray``.
        workers: number of local processes; None: one per core.
        address: address of the Ray cluster.

    Raises:
        UsageError: unknown name.
    """
    if name == "serial":
        return Serial()
    if name == "local":
        return LocalProcesses() if workers is None else LocalProcesses(workers=workers)
    if name == "ray":
        return RayCluster(address=address)
    raise UsageError(f"unknown executor '{name}'; allowed: local, ray, serial")
