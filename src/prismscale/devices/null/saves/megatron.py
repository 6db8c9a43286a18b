"""megatron-core's ``dist_checkpointing`` on the null device.

Its writer copies tensors to the host and then lets forked processes write them, or it hands both
tasks to one of its asynchronous callers, which is another process. Here this process does both, and
nothing is written: see :mod:`prismscale.devices.null.saves.checkpoints`.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from prismscale.devices.null.saves.host_copies import HostCopies
from prismscale.emulation.after_import import Change, replace
from prismscale.emulation.background import is_background

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_QUEUES = ("get_write_results_queue", "_get_write_results_queue")
_WRITERS = ("write_preloaded_data_multithread", "write_preloaded_data_multiproc")
"""Names since megatron-core 0.17, and before it."""


class Ledger(Protocol):
    """Records what is written."""

    def wrote(self, n_bytes: int, *, is_async: bool) -> None:
        """Record that this rank writes its part of a checkpoint."""
        ...


def _one_of(owner: Any, names: Sequence[str]) -> str:
    return next(name for name in names if hasattr(owner, name))


def _always(results: queue.Queue[Any]) -> Callable[[str], queue.Queue[Any]]:
    def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
        # The argument keeps its name, because Megatron-LM inspects it.
        return results

    return get_write_results_queue


class MegatronSaves:
    """Changes megatron-core's writer and its asynchronous callers.

    ``open_file`` makes a file, given a path and a mode. ``beside`` runs a function at no cost to
    the program.
    """

    def __init__(
        self,
        ledger: Ledger,
        copies: HostCopies,
        *,
        open_file: Callable[[Any, str], Any],
        beside: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._ledger = ledger
        self._copies = copies
        self._open_file = open_file
        self._beside = beside

    def changes(self) -> Mapping[str, Change]:
        """Return the changes of megatron-core's modules, by module name."""
        return {
            f"{_STRATEGIES}.filesystem_async": self._change_writer,
            f"{_STRATEGIES}.async_utils": self._change_callers,
        }

    def _change_writer(self, module: Any, undo: ExitStack) -> None:
        writer = module.FileSystemWriterAsync
        module.open = self._open_file
        undo.callback(delattr, module, "open")
        replace(undo, module, _one_of(module, _QUEUES), _always(queue.Queue()))
        replace(undo, writer, "preload_tensors", staticmethod(self._preload_tensors))
        write = functools.partial(self._write_buckets, writer.write_preloaded_data)
        replace(undo, writer, _one_of(writer, _WRITERS), staticmethod(write))

    def _preload_tensors(self, write_buckets: Any, non_blocking: bool = True) -> list[Any]:
        """Return the same buckets with host copies of the tensors."""
        copied = []
        for file_name, key, (bytes_data, tensor_data) in write_buckets:
            on_host = [
                (item, self._copies.of_tensor(tensor, non_blocking=non_blocking))
                for item, tensor in tensor_data
            ]
            copied.append((file_name, key, (bytes_data, on_host)))
        if non_blocking:
            torch.cuda.synchronize()
        return copied

    def _write_buckets(
        self,
        write_bucket: Callable[..., None],
        transforms: Any,
        use_msc: bool,
        rank: int,
        write_buckets: Any,
        results_queue: Any,
    ) -> None:
        """Write all buckets one after another, and put the results into the writer's queue."""
        found: dict[int, Any] = {}
        for index, bucket in enumerate(write_buckets):
            results: queue.Queue[Any] = queue.Queue()
            done: queue.Queue[int] = queue.Queue()
            done.put(index)
            write_bucket(transforms, index, bucket, results, done, True)
            _, found[index] = results.get()
            if isinstance(found[index], Exception):
                raise found[index]
        n_bytes = sum(result.size_in_bytes for part in found.values() for result in part)
        self._ledger.wrote(n_bytes, is_async=is_background())
        results_queue.put(found)

    def _change_callers(self, module: Any, undo: ExitStack) -> None:
        def schedule_async_call(caller: Any, async_req: Any) -> None:
            self._schedule(async_req)

        for caller in (module.TemporalAsyncCaller, module.PersistentAsyncCaller):
            replace(undo, caller, "schedule_async_call", schedule_async_call)

    def _schedule(self, request: Any) -> None:
        """Copy to the host, for which the program waits, and write in the background."""
        if request.async_fn is None:
            return
        arguments = list(request.async_fn_args)
        if request.preload_fn:
            arguments[1] = request.preload_fn()
        torch.cuda.synchronize()
        self._beside(functools.partial(request.async_fn, *arguments, **request.async_fn_kwargs))
