"""gloo links of live ranks and assistants: one context for the job, one tag for each channel."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from prismscale.errors import UsageError
from prismscale.host_comm.transport import connect

NAMESPACES = Path("/run/netns")
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def join(folder: Path, place: int, size: int, namespace: str = "") -> Any:
    """Join the context that ``size`` processes share, as member ``place``, and wait for all others.

    The processes rendezvous in ``folder``. Addresses are those of loopback, or of the first network
    interface in ``namespace``, which this thread enters.

    Raises:
        UsageError: the namespace does not exist, must not be entered, or has no interface.
    """
    interface = _enter(namespace) if namespace else None
    store = FileStore(str(folder / "transfers"), size)
    return connect(store, place, size, interface=interface)


def _enter(namespace: str) -> str:
    path = NAMESPACES / namespace
    try:
        with path.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except (OSError, AttributeError) as error:
        what = getattr(error, "strerror", None) or "not on this system"
        raise UsageError(
            f"--netns {namespace}: cannot enter {path} ({what}); 'ip netns add' makes one, and "
            f"entering it needs root (this is {sys.platform})"
        ) from error
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not names:
        raise UsageError(f"--netns {namespace}: it has no network interface but loopback")
    return names[0]


class GlooLinks:
    """Messages of one channel (Links). Messages of one pair arrive in order."""

    def __init__(self, context: Any, place: Callable[[int], int], tag: int) -> None:
        """``place`` maps a group rank to the context member that is or replaces it."""
        self._context, self._place, self._tag = context, place, tag

    def send(self, peer: int, data: torch.Tensor) -> Any:
        """Start a send. Returns a handle to wait on."""
        return self._context.send([data.view(torch.uint8)], self._place(peer), self._tag)

    def receive(self, peer: int, data: torch.Tensor) -> Any:
        """Start a receive. Returns a handle to wait on."""
        return self._context.recv([data.view(torch.uint8)], self._place(peer), self._tag)
