"""Where chunks of draws are computed: here, in local processes, or on a Ray cluster.

All of them run one function over a list of tasks, with one shared object that each worker receives
once. A result depends on its task alone, so every executor gives the same results bit for bit.
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
        """Results in the order of ``tasks``, as they become known.

        ``function`` must be importable by name: it is called in other processes.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Serial:
    """In this process, one task after the other."""

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        return (function(shared, task) for task in tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalProcesses:
    """In up to ``workers`` fresh processes of this machine, where the work is worth starting them
    and memory has room for as many more as this one."""

    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    worth_s: float = 5.0
    """Work that remains after the first task, from which on processes are started: each imports
    what the command imports."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers is {self.workers}; at least 1 is needed")

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        began = time.perf_counter()
        if tasks:
            # Done here, it tells how long the others will take.
            yield function(shared, tasks[0])
        rest = tasks[1:]
        work_s = (time.perf_counter() - began) * len(rest)
        count = min(self.workers, len(rest), _room())
        if count <= 1 or work_s < self.worth_s:
            yield from Serial().map(function, shared, rest)
            return
        others = set(multiprocessing.active_children())
        # Spawned, not forked: a fork would copy the locks of threads that it does not copy.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(
            count, mp_context=context, initializer=_receive, initargs=(function, shared)
        )
        try:
            yield from pool.map(_run, rest)
        except BaseException:
            # A task may take a minute, and after Ctrl-C nobody waits for what it gives.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _room() -> int:
    """How many processes as large as this one memory takes: a worker holds what this one has shared
    with it, and draws as much at a time."""
    return int(psutil.virtual_memory().available // psutil.Process().memory_info().rss)


_received: tuple[Callable[[Any, Any], Any], Any]


def _receive(function: Callable[[Any, Any], Any], shared: Any) -> None:
    global _received
    # Ctrl-C reaches every process of the terminal; ours end when their parent lets them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    _received = (function, shared)


def _run(task: Any) -> Any:
    function, shared = _received
    return function(shared, task)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster:
    """On a Ray cluster: ``pip install prismscale[ray]``, with prismscale installed on its nodes."""

    address: str | None = None
    """Of a running cluster, or ``auto``; None starts one on this machine."""

    def map(
        self, function: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        """Results in order.

        Raises:
            UsageError: Ray is not installed, or there is no cluster at the address.
        """
        with connected_ray(self.address) as ray:
            # Tasks that only wait for a core hold no data, so one reference serves them all.
            reference = ray.put(shared)
            remote = ray.remote(function).options(scheduling_strategy="SPREAD")
            waiting = [remote.remote(reference, task) for task in tasks]
            for result in waiting:
                yield ray.get(first_done(ray, [result]))


def executor_named(
    name: str, *, workers: int | None = None, address: str | None = None
) -> Executor:
    """The executor that a command line asks for.

    Args:
        name: ``local``, ``serial`` or ``ray``.
        workers: local processes; None is one a core.
        address: of the Ray cluster.

    Raises:
        UsageError: another name.
    """
    if name == "serial":
        return Serial()
    if name == "local":
        return LocalProcesses() if workers is None else LocalProcesses(workers=workers)
    if name == "ray":
        return RayCluster(address=address)
    raise UsageError(f"unknown executor '{name}'; allowed: local, ray, serial")
