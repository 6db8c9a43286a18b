"""Install the emulated process group under an unmodified ``torch.distributed`` program.

The seam: torch builds every group in one place (``distributed_c10d._new_process_group_helper``)
from names that it looks up in its own module: ``ProcessGroup``, ``ProcessGroupGloo``,
``ProcessGroupNCCL``, …, ``TCPStore``, and, for every other backend, the plugin table of
``Backend``. :func:`install` rebinds these names and leaves torch's files alone. Compared with
registering one more backend as a plugin, this choice has these consequences:

* every backend name works and ``get_backend()`` answers what the program asked for;
* ``type(group) is ProcessGroup`` holds inside torch, so ``batch_isend_irecv`` coalesces exactly
  where the real backend would, and ``cpu:gloo,cuda:nccl`` keeps two backends in one group;
* rendezvous (``env://``, ``tcp://``, ``file://``) is torch's own code on stores without peers;
* ``is_nccl_available()`` and its like answer True, because torch's availability flags are set.

Names that a build lacks (a CPU-only torch has no ``ProcessGroupNCCL``) are added, and removed on
exit. A rebound object is replaced in every loaded module that holds it, since modules import names
by value. torch's ``fake`` backend is left alone: its groups never communicate, emulated or not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from prismscale.emulation import rendezvous_store, work
from prismscale.emulation.backends import stub_backends
from prismscale.emulation.hook import CommunicationHook, GroupHandle, GroupObserver
from prismscale.emulation.process_group import EmulatedProcessGroup
from prismscale.emulation.torchrun_env import RankEnvironment
from prismscale.errors import UsageError

_FLAGS = (
    "_NCCL_AVAILABLE",
    "_GLOO_AVAILABLE",
    "_UCC_AVAILABLE",
    "_MPI_AVAILABLE",
    "_XCCL_AVAILABLE",
)
_NCCL_TIMEOUT = timedelta(minutes=10)
_NCCL_VERSION = (2 << 32) | (28 << 16) | 9
"""Version 2.28.9, which torch.cuda.nccl.version() answers where this torch has no NCCL."""
_MISSING = object()


class Groups:
    """The groups of one installation: numbers this rank's groups, reports all to the observer."""

    def __init__(
        self, environment: RankEnvironment, hook: CommunicationHook, observer: GroupObserver | None
    ) -> None:
        self.environment = environment
        self.hook = hook
        self._observer = observer
        self._n_groups = 0

    def created(self, group: Any, ranks: Sequence[int], name: str, backend: str) -> None:
        """Note a new group of ``ranks``; ``group`` is torch's marker if this rank is no member."""
        members = tuple(ranks)
        group_index = None
        if isinstance(group, EmulatedProcessGroup):
            group_index = self._n_groups
            self._n_groups += 1
            handle = GroupHandle(
                group_index=group_index,
                ranks=members,
                group_rank=group.rank(),
                name=name,
                backend=backend,
            )
            group.enter(handle, self.hook)
        if self._observer is not None:
            self._observer.group_created(members, name, backend, group_index)

    def adopt(self, group: EmulatedProcessGroup) -> GroupHandle:
        """Return the handle of a group that did not come through :meth:`created`.

        ``shrink_group`` creates a group without torch's helper: it is numbered here. A silent group
        never reaches a hook, so it has no number (-1).
        """
        world = distributed_c10d._world
        positions = sorted(world.pg_group_ranks[group].items(), key=lambda pair: pair[1])
        ranks = tuple(rank for rank, _ in positions)
        name, backend = _plain_name(group.group_desc), str(world.pg_map[group][0])
        if not group.is_silent:
            self.created(group, ranks, name, backend)
            return group.handle
        return GroupHandle(
            group_index=-1, ranks=ranks, group_rank=group.rank(), name=name, backend=backend
        )


@contextlib.contextmanager
def install(
    environment: RankEnvironment,
    hook: CommunicationHook,
    observer: GroupObserver | None = None,
    keys: Callable[[str], rendezvous_store.KeySpace] | None = None,
) -> Iterator[Groups]:
    """Let ``torch.distributed`` run as the rank that ``environment`` describes.

    ``hook`` answers every communication. ``keys`` makes the key space of a store's address; it is
    given where peers exist that write keys.

    On exit the process group is destroyed if the program left it open. torch, ``os.environ`` and
    ``sys.excepthook`` are as before, so that ranks can run one after another in one process.
    Raises :class:`UsageError` if a process group already exists or a rank is already emulated.
    """
    if EmulatedProcessGroup.registry is not None:
        raise UsageError(
            "a rank is being emulated already: one process emulates one rank at a time"
        )
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised already: install the emulation before")
    groups = Groups(environment, hook, observer)
    with contextlib.ExitStack() as undo:
        undo.enter_context(environment.applied())
        undo.callback(setattr, sys, "excepthook", sys.excepthook)
        undo.enter_context(rendezvous_store.shared_by(environment, keys))
        for name, replacement in _replacements(groups).items():
            undo.enter_context(rebound(name, replacement))
        for flag in _FLAGS:
            undo.enter_context(_attribute(distributed_c10d, flag, True))
        # It is None where this torch has no NCCL, and torch then warns at each new group.
        timeout = getattr(distributed_c10d, "default_pg_nccl_timeout", None) or _NCCL_TIMEOUT
        undo.enter_context(_attribute(distributed_c10d, "default_pg_nccl_timeout", timeout))
        if not hasattr(torch._C, "_nccl_version"):
            undo.enter_context(_attribute(torch._C, "_nccl_version", lambda: _NCCL_VERSION))
            undo.enter_context(_attribute(torch._C, "_nccl_version_suffix", lambda: b""))
        if not hasattr(dist, "set_timeout"):
            # Programs written for a later torch call this function.
            undo.enter_context(_attribute(dist, "set_timeout", _accept_timeout))
        undo.enter_context(_answered_plugins())
        undo.enter_context(_attribute(stub_backends.EmulatedMPI, "world", _whoami(environment)))
        # Rebound in the module of torch's group factory only: elsewhere ``ProcessGroup`` must stay
        # the base class of emulated groups and torch's own.
        undo.enter_context(_attribute(distributed_c10d, "ProcessGroup", EmulatedProcessGroup))
        undo.enter_context(_attribute(EmulatedProcessGroup, "registry", groups))
        undo.callback(_destroy_groups)
        yield groups


def _replacements(groups: Groups) -> dict[str, Any]:
    """Return the replacement of each torch name while a rank is emulated."""
    helper = distributed_c10d._new_process_group_helper
    return {
        "ProcessGroupGloo": stub_backends.EmulatedGloo,
        "ProcessGroupNCCL": stub_backends.EmulatedNCCL,
        "ProcessGroupUCC": stub_backends.EmulatedUCC,
        "ProcessGroupMPI": stub_backends.EmulatedMPI,
        "ProcessGroupXCCL": stub_backends.EmulatedXCCL,
        "TCPStore": rendezvous_store.EmulatedTCPStore,
        "FileStore": rendezvous_store.EmulatedFileStore,
        "HashStore": rendezvous_store.EmulatedHashStore,
        "_new_process_group_helper": _observing_helper(helper, groups),
        "split_group": _observing_split(distributed_c10d.split_group, groups),
        "_get_split_source": _no_split_source,
        "_create_process_group_wrapper": _unwrapped,
        "collect_all": work.collect_all,
        "wait_all": work.wait_all,
    }


def _observing_helper(original: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(
        group_size: int,
        group_rank: int,
        ranks: Sequence[int],
        backend: str,
        *rest: Any,
        **named: Any,
    ) -> Any:
        known = len(distributed_c10d._world.pg_map)
        group, group_store = original(group_size, group_rank, ranks, backend, *rest, **named)
        is_member = isinstance(group, EmulatedProcessGroup)
        is_known = is_member and len(distributed_c10d._world.pg_map) == known
        if backend != dist.Backend.FAKE and not is_known:
            members = ranks or range(group.size())
            groups.created(group, members, _plain_name(named.get("group_desc")), str(backend))
        return group, group_store

    return create


def _observing_split(original: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, *rest: Any, **named: Any
    ) -> Any:
        child = original(parent_pg, split_ranks, *rest, **named)
        parent: Any = parent_pg or dist.group.WORLD
        of_parent, backend = parent.handle.ranks, str(dist.get_backend(parent))
        for members in split_ranks:
            ranks = [of_parent[rank] for rank in sorted(members)]
            is_mine = child is not None and parent.rank() in members
            desc = child.group_desc if is_mine else named.get("group_desc")
            groups.created(child if is_mine else None, ranks, _plain_name(desc), backend)
        return child

    return split_group


def _plain_name(group_desc: str | None) -> str:
    return "" if group_desc in (None, "undefined") else str(group_desc)


def _no_split_source(*parent_and_device: Any) -> None:
    """Return None: no communicator is derived from another, and ``split_group`` needs none."""


def _unwrapped(wrapped_pg: Any, *arguments: Any, **named: Any) -> Any:
    """Return the group itself.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch's wrapper compares peers' collectives, and there are
    no peers.
    """
    return wrapped_pg


def _accept_timeout(timeout: timedelta, group: Any = None) -> None:
    """Ignore the timeout: an emulated communication never times out."""


def _whoami(environment: RankEnvironment) -> tuple[int, int]:
    return environment.rank, environment.world_size


class _Plugins(dict[str, Any]):
    """Backend's plugin table in which every registered name but ``fake`` creates a stub."""

    def __getitem__(self, name: str) -> Any:
        plugin = super().__getitem__(name)
        if name == "FAKE":
            return plugin

        create = functools.partial(stub_backends.create_by_name, name.lower())
        return type(plugin)(create, True)


@contextlib.contextmanager
def _answered_plugins() -> Iterator[None]:
    original = dist.Backend._plugins
    answered = _Plugins(original)
    try:
        with _attribute(dist.Backend, "_plugins", answered):
            yield
    finally:
        # Modules imported in the meantime have registered backends and will not do so again.
        original.update(dict.items(answered))


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def rebound(name: str, replacement: Any) -> Iterator[None]:
    """Rebind torch's ``name`` in every loaded module that holds the same object; undone on exit."""
    home = torch.futures if hasattr(torch.futures, name) else distributed_c10d
    original = next(
        (vars(module)[name] for module in (home, c10d, dist) if name in vars(module)), _MISSING
    )
    if original is _MISSING:
        with contextlib.ExitStack() as undo:
            for module in (dist, distributed_c10d, c10d):
                undo.enter_context(_attribute(module, name, replacement))
            yield
        return
    _replace_everywhere(name, original, replacement)
    try:
        yield
    finally:
        # Scan again: modules imported in the meantime hold the replacement.
        _replace_everywhere(name, replacement, original)


def _replace_everywhere(name: str, old: Any, new: Any) -> None:
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        is_ours = module_name.startswith("prismscale.")
        if names is not None and names.get(name) is old and not is_ours:
            names[name] = new


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
