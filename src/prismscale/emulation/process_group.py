"""A process group without peers.

:mod:`prismscale.emulation.entry_points` overrides every communication method of ``ProcessGroup``.
For everything that is not a communication (group name, device types, bound device, backend name)
the C++ base class answers by itself, because each backend the program asks for registers an
*anchor*: torch's ``FakeProcessGroup`` told to raise on any collective. A communication that
bypasses the overrides therefore fails loudly instead of leaving its outputs undefined.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch import distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from prismscale.emulation.backends.stub_backends import EmulatedBackend
from prismscale.emulation.entry_points import EntryPoints
from prismscale.emulation.hook import Collective, CommunicationHook, GroupHandle
from prismscale.emulation.work import completed
from prismscale.errors import PrismscaleError

_Base: Any = dist.ProcessGroup
"""Untyped, because the overloads in torch's type stub name the same argument differently."""


class GroupRegistry(Protocol):
    """Numbers the groups of this rank and holds the hook that answers their communications."""

    hook: CommunicationHook

    def adopt(self, group: EmulatedProcessGroup) -> GroupHandle:
        """Return the handle of a group that torch did not create through ``new_group``."""
        ...


class _SilentHook:
    """Answers groups of torch's own ``fake`` backend: no communication takes place."""

    def communicate(self, batch: Sequence[Collective]) -> Work:
        return completed([tensor for collective in batch for tensor in collective.outputs])


class EmulatedProcessGroup(EntryPoints, _Base):  # type: ignore[misc]
    """One rank's view of a group whose other members do not exist.

    torch constructs it in place of ``ProcessGroup`` (see :mod:`prismscale.emulation.install`).
    """

    registry: ClassVar[GroupRegistry | None] = None
    """Registry of the installation in force. A class variable, because torch calls the constructor
    and passes no registry."""
    objects_on_host: ClassVar[bool] = False
    """True on a device whose memory holds no bytes: pickled objects then travel in host memory,
    whatever the backend."""

    def __init__(self, *arguments: Any) -> None:
        """Take ``(store, rank, size)`` or ``(rank, size)``, as ``ProcessGroup`` does."""
        *store, rank, size = arguments
        # The base's constructor with a store cannot build a Python subclass.
        super().__init__(rank, size)
        self._store: Store | None = store[0] if store else None
        self._backends: dict[str, Any] = {}

    # What torch asks about the group

    @property
    def handle(self) -> GroupHandle:
        """The group as hooks see it."""
        handle = self._handle
        return self._late_handle() if handle is None else handle

    @property
    def is_silent(self) -> bool:
        """True for torch's own ``fake`` backend, which never communicates."""
        return isinstance(self._hook, _SilentHook)

    def enter(self, handle: GroupHandle, hook: CommunicationHook) -> None:
        """Tie the group to the hook that answers it."""
        self._handle = handle
        if self._hook is None:
            self._hook = hook

    def _late_handle(self) -> GroupHandle:
        registry = type(self).registry
        if registry is None:
            raise PrismscaleError(
                "a process group was used after its emulation had ended: keep every communication "
                "inside the `with install(...)` block that created the group"
            )
        self.enter(registry.adopt(self), registry.hook)
        assert self._handle is not None
        return self._handle

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any) -> None:
        self._backends[device.type] = backend
        if isinstance(backend, EmulatedBackend):
            backend.group = weakref.ref(self)
            super()._register_backend(device, backend_type, backend.anchor)
            if not _is_present(device) and "cpu" not in self._backends:
                # This machine lacks the device that the backend serves: cpu stands in for it.
                self._register_backend(torch.device("cpu"), backend_type, backend)
        else:
            self._hook = _SilentHook()
            super()._register_backend(device, backend_type, backend)

    def _get_backend(self, device: torch.device | str) -> Any:
        backend = self._backends.get(torch.device(device).type)
        if backend is None and self.objects_on_host:
            backend = next(iter(self._backends.values()), None)
        if backend is None:
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}"
            )
        return backend

    def getBackendName(self) -> str:
        """Return the backend name that C++ callers see.

        It is never ``gloo``: DDP's logger would cast the backend of such a group to gloo's class.
        """
        return "emulated"

    def name(self) -> str:
        """The backend's name, as ``ProcessGroup.name()`` spells it."""
        backends = list(self._backends.values())
        return str(backends[0].name()) if backends else "undefined"

    _get_backend_name = name

    def get_group_store(self) -> Store:
        """The store that the group was created with."""
        if self._store is None:
            raise RuntimeError("this process group was created without a store")
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: an emulated communication never times out."""

    def shutdown(self) -> None:
        """Do nothing: no work runs in the background."""

    def abort(self) -> None:
        """Do nothing: no work runs in the background."""

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> EmulatedProcessGroup | None:
        """Return the group of ``new_ranks`` (ranks of this group); None if this rank is outside."""
        ranks = sorted(new_ranks)
        if self.rank() not in ranks:
            return None
        store = PrefixStore(f"{group_name}/", self.get_group_store())
        child = type(self)(store, ranks.index(self.rank()), len(ranks))
        kept = [device.type for device in device_types] if device_types else list(self._backends)
        for device in kept:
            backend = self._backends[device].split(child.rank(), child.size(), opts)
            child._register_backend(torch.device(device), backend.backend_type, backend)
            child._set_default_backend(backend.backend_type)
        child._set_group_name(group_name or f"{self.group_name}:split")
        child._set_group_desc(group_desc or f"{self.group_desc}:split")
        return child


def _is_present(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return device.type == "cpu" or (accelerator is not None and accelerator.type == device.type)
