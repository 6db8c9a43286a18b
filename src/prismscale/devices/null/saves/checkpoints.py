"""Checkpoints on the null device: counted, costed, and not written.

The tensors in a distributed checkpoint have no values, and ranks that start later would load a
folder that looks like a complete checkpoint. So torch's own code writes the files of
``torch.distributed.checkpoint`` to file objects that discard the data, which gives the exact sizes.
A write takes the time that :class:`~prismscale.devices.storage.Storage` says. This is host time of
the program, unless the program continues during the write. Copies to the host run on the device as
the program asks for them.

No thread is used: an asynchronous save does its work at once, and the program pays only for what it
does itself.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from prismscale.analysis.emulated import CheckpointUse
from prismscale.devices.null.saves.host_copies import HostCopies
from prismscale.devices.null.saves.megatron import MegatronSaves
from prismscale.devices.null.saves.plain_saves import saving_hollow, unchecked
from prismscale.devices.storage import Storage
from prismscale.emulation.after_import import Change, changed, replace
from prismscale.emulation.background import in_background, is_background

_PACKAGE = "torch.distributed.checkpoint"


class CheckpointLedger:
    """Records what this rank writes, and lets the program wait for synchronous writes."""

    def __init__(
        self, library: ctypes.PyDLL, storage: Storage, optimizer_calls: Callable[[], int]
    ) -> None:
        self._library = library
        self._storage = storage
        self._optimizer_calls = optimizer_calls
        self.uses: list[CheckpointUse] = []

    def wrote(self, n_bytes: int, *, is_async: bool) -> None:
        """Record a write of the rank's part of a checkpoint; a synchronous one takes host time."""
        write_ns = self._storage.write_ns(n_bytes)
        if not is_async:
            self._library.ps_advance_host(write_ns)
        self.uses.append(
            CheckpointUse(
                after_optimizer_calls=self._optimizer_calls(),
                n_bytes=n_bytes,
                is_async=is_async,
                write_ns=write_ns,
            )
        )


class NowhereFile(io.RawIOBase):
    """A writable file that discards its data and keeps only its length."""

    def __init__(self) -> None:
        self._length = 0

    def write(self, data: Any) -> int:
        """Count the bytes of ``data``."""
        n_bytes = memoryview(data).nbytes
        self._length += n_bytes
        return n_bytes

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._length

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of a file that can be synced, because writers sync their files."""
        return _synced_file()


@functools.cache
def _synced_file() -> int:
    return os.memfd_create("prismscale-checkpoint")


class CheckpointSaves:
    """Changes torch's checkpoint writers and stagers, and megatron-core's, for the null device."""

    def __init__(self, library: ctypes.PyDLL, ledger: CheckpointLedger, copies: HostCopies) -> None:
        self._library = library
        self._ledger = ledger
        self._copies = copies

    @contextmanager
    def active(self) -> Iterator[None]:
        """Apply the changes while the block runs."""
        with changed(self._changes()):
            yield

    def _changes(self) -> Mapping[str, Change]:
        megatron = MegatronSaves(
            self._ledger,
            self._copies,
            open_file=lambda path, mode: NowhereFile(),
            beside=self._beside,
        )
        return {
            "torch.serialization": self._change_plain,
            f"{_PACKAGE}.filesystem": self._change_writers,
            f"{_PACKAGE}._state_dict_stager": self._change_staging,
            f"{_PACKAGE}.staging": self._change_stager,
            f"{_PACKAGE}._async_thread_executor": self._change_executor,
            f"{_PACKAGE}._async_process_executor": self._change_executor,
            **megatron.changes(),
        }

    def _change_plain(self, module: Any, undo: ExitStack) -> None:
        name = "_open_zipfile_writer"
        made = saving_hollow(vars(module)[name], self._copies, self._ledger.wrote)
        replace(undo, module, name, made)

    def _change_writers(self, module: Any, undo: ExitStack) -> None:
        writer = module._FileSystemWriter
        replace(undo, writer, "_write_data", self._counted(writer._write_data))
        replace(undo, writer, "finish", lambda self, metadata, results: None)
        for loader, non_blocking in (
            (module._OverlappingCpuLoader, True),
            (module._SerialCpuLoader, False),
        ):
            made = self._loading(loader.__init__, non_blocking)
            replace(undo, loader, "__init__", made)

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _write_data(writer: Any, *arguments: Any, **named: Any) -> Any:
            with to_nowhere(writer.fs):
                written = original(writer, *arguments, **named)
            n_bytes = sum(result.size_in_bytes for result in written.value())
            self._ledger.wrote(n_bytes, is_async=is_background())
            return written

        return _write_data

    def _loading(self, original: Callable[..., Any], non_blocking: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(loader: Any, resolve_fun: Any, *arguments: Any, **named: Any) -> None:
            def resolve(item: Any) -> torch.Tensor:
                return self._copies.of_tensor(resolve_fun(item), non_blocking=non_blocking)

            original(loader, resolve, *arguments, **named)

        return begin

    def _change_staging(self, module: Any, undo: ExitStack) -> None:
        original = module.StateDictStager._stage_untyped_storage

        @functools.wraps(original)
        def _stage_untyped_storage(stager: Any, storage: Any, non_blocking: bool = False) -> Any:
            copied = self._copies.of_storage(storage, non_blocking=non_blocking)
            if copied is not None:
                return copied
            with self._copies.unasked():
                return original(stager, storage, non_blocking)

        replace(undo, module.StateDictStager, "_stage_untyped_storage", _stage_untyped_storage)

    def _change_stager(self, module: Any, undo: ExitStack) -> None:
        original = module.DefaultStager.stage

        @functools.wraps(original)
        def stage(stager: Any, state_dict: Any, **named: Any) -> Any:
            if not stager._config.use_async_staging:
                return original(stager, state_dict, **named)
            stager._staging_future = staged = self._staged(stager, state_dict, named)
            return staged

        replace(undo, module.DefaultStager, "stage", stage)

    def _staged(self, stager: Any, state_dict: Any, named: Mapping[str, Any]) -> StagedState:
        """Issue the copies on the stager's stream. The host does not wait for them yet."""
        stream = stager._staging_stream
        stager._staging_stream = UnwaitedStream(stream)
        try:
            copied = stager._stage(state_dict, **named)
        finally:
            stager._staging_stream = stream
        return StagedState(copied, stream.record_event())

    def _change_executor(self, module: Any, undo: ExitStack) -> None:
        replace(undo, module, "ThreadPoolExecutor", functools.partial(AtOnce, self._beside))

    def _beside(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` as background work, which costs the program nothing."""
        self._library.ps_without_cost(1)
        try:
            with in_background():
                return work()
        finally:
            self._library.ps_without_cost(0)


@contextmanager
def to_nowhere(file_system: Any) -> Iterator[None]:
    """While the block runs, ``file_system`` makes files that discard data, without checksums."""

    @contextmanager
    def create_stream(path: Any, mode: str) -> Iterator[NowhereFile]:
        yield NowhereFile()

    file_system.create_stream = create_stream
    try:
        with unchecked():
            yield
    finally:
        del file_system.create_stream


class AtOnce:
    """Replaces a pool of threads: a submitted function runs at once, through ``run``."""

    def __init__(
        self, run: Callable[[Callable[[], Any]], Any], *arguments: Any, **named: Any
    ) -> None:
        self._run = run

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Run ``function`` and return a future that is done."""
        done: Future[Any] = Future()
        try:
            done.set_result(self._run(functools.partial(function, *arguments, **named)))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, **named: Any) -> None:
        """Do nothing, because nothing is running."""


class UnwaitedStream:
    """A stream on which a thread issues work without waiting for it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        return self._stream.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._stream.__exit__(*error)

    def synchronize(self) -> None:
        """Do nothing. Whoever asks for the copies waits for them."""


class StagedState(Future[Any]):
    """Copies on their way to the host, with the event after which they have arrived."""

    def __init__(self, copied: Any, event: Any) -> None:
        super().__init__()
        self._event = event
        self.set_result(copied)

    def result(self, timeout: float | None = None) -> Any:
        """Return the copies. The program waits for them; a background writer does not."""
        if not is_background():
            self._event.synchronize()
        return super().result(timeout)
