"""A connection to a Ray cluster: ``pip install prismscale[ray]``, with prismscale on its nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prismscale.errors import UsageError

ANSWER_WITHIN_S = 5.0
"""How long a Ray cluster may take to answer at all."""


@contextmanager
def connected_ray(address: str | None) -> Iterator[Any]:
    """The module ``ray``, connected; a connection that was there before is taken and stays.

    Args:
        address: of a running cluster, or ``auto``; None starts one on this machine.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError as error:
        raise UsageError(f"no Ray cluster at '{address}': {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Ray itself asks an address that does not answer again and again for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN_S):
            pass
    except (OSError, OverflowError) as error:
        raise UsageError(f"no Ray cluster at '{address}': {error}") from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--executor ray needs Ray: pip install 'prismscale[ray]', or use --executor local"
        ) from error
    return ray
