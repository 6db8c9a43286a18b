"""A connection to a Ray cluster: ``pip install prismscale[ray]``, with prismscale on its nodes.

[Note: signals] Ray takes SIGTERM for itself. Its compiled code ends the process at a SIGTERM,
unless a variable forbids it. ``ray.init`` also replaces the handler that is there, which it can do
only in the main thread, so another thread calls it. If a handler raises while Ray's compiled code
waits, the exception arrives only when that wait is over, as the cause of a ``SystemError``. So no
wait is long.

[Note: workers] Ray gives up a worker that has not reported within a minute, by the time of day. If
the clock is set forward meanwhile, Ray gives up all workers, and after a few times it waits for
ever. So that minute is made very long here. A worker that dies is noticed without it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prismscale.errors import UsageError
from prismscale.processes.reaper import guarded_folder
from prismscale.processes.variables import variables_set

ANSWER_WITHIN_S = 5.0
"""How long a Ray cluster may take to answer at all."""
SCRATCH = "PRISMSCALE_SCRATCH"
"""Names a folder that is removed with the cluster, in the processes of a cluster that we start."""
_PATIENT = {"RAY_worker_register_timeout_seconds": str(3 * 86_400)}
"""Variables of Ray; see [Note: workers]."""
_WAIT_S = 0.5
"""Longest single wait in Ray's code; see [Note: signals]."""


@contextmanager
def connected_ray(address: str | None) -> Iterator[Any]:
    """Connect to Ray and yield the module ``ray``. An existing connection is used and stays.

    Args:
        address: address of a running cluster, or ``auto``; None starts one on this machine.

    Raises:
        UsageError: Ray is not installed or does not start, or there is no cluster at the address.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    _check_reachable(address)
    # Processes that Ray starts end with the thread that started them, so one thread serves for the
    # whole connection.
    own = _own_folder() if address is None else nullcontext()
    with own as folder, ThreadPoolExecutor(max_workers=1) as thread:
        try:
            _connect(ray, address, folder, thread)
            yield ray
        except SystemError as error:
            if error.__cause__ is None or isinstance(error.__cause__, Exception):
                raise
            raise error.__cause__ from None
        finally:
            thread.submit(ray.shutdown).result()
            _handle_again()


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for Ray's files, whose users end with it.

    Ray's agents do not notice that this process was killed if they have only just begun.
    """
    # In the place that Ray itself would choose, because paths of sockets must be short.
    parent = os.environ.get("RAY_TMPDIR", "/tmp")
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(guarded_folder("prismscale-", parent))
        except OSError as error:
            raise UsageError(
                f"Ray's files have no place in '{parent}': {error.strerror}; name a folder with a "
                "short path in RAY_TMPDIR, or use --executor local"
            ) from error
        stack.enter_context(variables_set({SCRATCH: str(folder), **_PATIENT}))
        yield folder


def first_done(ray: Any, results: Sequence[Any]) -> Any:
    """Wait for the first of ``results`` that is there. A signal ends the wait."""
    done: list[Any] = []
    while not done:
        done, _ = ray.wait(list(results), num_returns=1, timeout=_WAIT_S)
    return done[0]


def _connect(ray: Any, address: str | None, folder: Path | None, thread: Executor) -> None:
    """Connect on ``thread``; see [Note: signals]."""
    asked = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if folder is not None:
        asked["_temp_dir"] = str(folder)
    try:
        thread.submit(ray.init, **asked).result()
    except ConnectionError as error:
        raise UsageError(f"no Ray cluster at '{address}': {error}") from error
    except Exception as error:  # Ray itself raises no class of its own here
        raise UsageError(f"Ray does not start ({error}); use --executor local") from error
    _handle_again()


def _handle_again() -> None:
    """Install our SIGTERM handler again: Ray's compiled code has covered or removed it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _check_reachable(address: str | None) -> None:
    """Refuse an address that does not answer. Ray itself would retry it for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN_S):
            pass
    except (OSError, OverflowError) as error:
        raise UsageError(f"no Ray cluster at '{address}': {error}") from error


def _import_ray() -> Any:
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # read at import
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--executor ray needs Ray: pip install 'prismscale[ray]', or use --executor local"
        ) from error
    return ray
