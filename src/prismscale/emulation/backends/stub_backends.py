"""Stand-ins for torch's backend classes (``ProcessGroupNCCL``, ``ProcessGroupGloo``, …).

Python cannot subclass torch's C++ ``Backend``, and a real backend would connect to peers. The
program finds a stand-in under the backend's name: it can be constructed, answers capability and
option queries as that backend would, and passes communications on to the group it belongs to.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from prismscale.emulation.entry_points import EntryPoints
from prismscale.errors import UsageError

_COMMUNICATIONS = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "reduce",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "all_gather_single",
        "all_gather_single_coalesced",
        "_allgather_base",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "_reduce_scatter_base",
        "gather",
        "scatter",
        "alltoall",
        "alltoall_base",
        "all_to_all_single",
        "send",
        "recv",
        "recv_anysource",
        "barrier",
        "monitored_barrier",
        "_start_coalescing",
        "_end_coalescing",
        "_get_sequence_number_for_group",
    }
)


class BackendOptions(c10d.Backend.Options):
    """Options of a backend that this torch was built without."""

    backend_name: ClassVar[str] = "undefined"
    default_timeout: ClassVar[timedelta] = timedelta(minutes=30)

    def __init__(self) -> None:
        super().__init__(self.backend_name, self.default_timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendOptions:
        twin = type(self)()
        for name in ("_timeout", "global_ranks_in_group", "group_name"):
            setattr(twin, name, getattr(self, name))
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin


class _NCCLConfig:
    """``ncclConfig_t``: accepts any field; undefined ones read as NCCL's undefined integer."""

    _UNDEFINED = -(2**31)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._UNDEFINED


class _NCCLOptions(BackendOptions):
    backend_name = "nccl"
    default_timeout = timedelta(minutes=10)

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__()
        self.is_high_priority_stream = is_high_priority_stream
        self.config = _NCCLConfig()
        self.split_from: Any = None
        self.split_color = 0


class _GlooOptions(BackendOptions):
    backend_name = "gloo"


class _XCCLOptions(BackendOptions):
    backend_name = "xccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__()
        self.is_high_priority_stream = is_high_priority_stream


def _real_options(class_name: str, otherwise: type[BackendOptions]) -> Any:
    """Return torch's own options class if this build has the backend: C++ checks the type."""
    real = getattr(c10d, class_name, None)
    return getattr(real, "Options", otherwise)


class EmulatedBackend:
    """A backend as the program sees it; communications go to :attr:`group`."""

    backend_name: ClassVar[str] = "custom"
    backend_type: ClassVar[Any] = ProcessGroup.BackendType.CUSTOM
    Options: ClassVar[Any] = BackendOptions

    supports_splitting: bool = False
    supports_coalescing: bool = False
    supports_shrinking: bool = False
    supports_time_estimate: bool = False
    bound_device_id: torch.device | None = None

    def __init__(self, store: Any, rank: int, size: int, options: Any = None, **more: Any) -> None:
        self.store = store
        self._rank = rank
        self._size = size
        timeout = more.get("timeout")
        self._options = options if isinstance(options, c10d.Backend.Options) else self.Options()
        if timeout is not None:
            self._options._timeout = timeout
        self.group: weakref.ref[EntryPoints] | None = None
        self.anchor = _anchor(rank, size)
        self._n_splits = 0

    def __getattr__(self, name: str) -> Any:
        if name not in _COMMUNICATIONS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        group = self.group() if self.group is not None else None
        if group is None:
            raise UsageError(
                f"{self.backend_name}.{name} was called on a backend outside any process group: "
                "create groups with torch.distributed.new_group"
            )
        return getattr(group, name)

    @property
    def options(self) -> Any:
        """The options that the backend was created with."""
        return self._options

    def rank(self) -> int:
        """This rank's position in the group."""
        return self._rank

    def size(self) -> int:
        """Number of members of the group."""
        return self._size

    def name(self) -> str:
        """The backend's name, for example ``nccl``."""
        return self.backend_name

    def split(self, rank: int, size: int, options: Any = None) -> EmulatedBackend:
        """Return the backend of a group split from this one's group."""
        self._n_splits += 1
        return type(self)(self.store, rank, size, options or copy.deepcopy(self._options))

    def shrink(self, excluded: Sequence[int], flags: int = 0, options: Any = None) -> Any:
        """Return the backend of the group that remains without the members ``excluded``."""
        rank = self._rank - sum(1 for other in excluded if other < self._rank)
        return type(self)(self.store, rank, self._size - len(excluded), options)

    def comm_split_count(self) -> int:
        """Return how often this backend has been split."""
        return self._n_splits

    @property
    def uid(self) -> int:
        """A number that identifies this backend."""
        return id(self)

    def _is_initialized(self) -> bool:
        return True

    def get_error(self) -> Any:
        """Return success: emulated communications do not fail."""
        return c10d.ErrorType.SUCCESS

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: registered buffers are not emulated; programs fall back to plain ones."""
        return False

    def _accept(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: these resource and timeout calls change nothing without peers."""

    shutdown = _accept
    abort = _accept
    set_timeout = _accept
    _set_default_timeout = _accept
    _set_sequence_number_for_group = _accept
    _add_ephemeral_timeout = _accept
    _group_start = _accept
    _group_end = _accept
    eager_connect_single_device = _accept
    perform_nocolor_split = _accept
    register_mem_pool = _accept
    deregister_mem_pool = _accept
    suspend = _accept
    resume = _accept
    _enable_collectives_timing = _accept
    _wait_for_pending_works = _accept


class EmulatedGloo(EmulatedBackend):
    """``ProcessGroupGloo``."""

    backend_name = "gloo"
    backend_type = ProcessGroup.BackendType.GLOO
    Options = _GlooOptions
    supports_splitting = True

    @staticmethod
    def create_device(*arguments: Any, **named: Any) -> None:
        """Do nothing: no network interface is opened."""

    create_default_device = create_device


class EmulatedNCCL(EmulatedBackend):
    """``ProcessGroupNCCL``."""

    backend_name = "nccl"
    backend_type = ProcessGroup.BackendType.NCCL
    Options = _real_options("ProcessGroupNCCL", _NCCLOptions)
    NCCLConfig = getattr(getattr(c10d, "ProcessGroupNCCL", None), "NCCLConfig", _NCCLConfig)
    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = True


class EmulatedUCC(EmulatedBackend):
    """``ProcessGroupUCC``."""

    backend_name = "ucc"
    backend_type = ProcessGroup.BackendType.UCC


class EmulatedXCCL(EmulatedBackend):
    """``ProcessGroupXCCL``."""

    backend_name = "xccl"
    backend_type = ProcessGroup.BackendType.XCCL
    Options = _real_options("ProcessGroupXCCL", _XCCLOptions)
    supports_splitting = True
    supports_coalescing = True


class EmulatedMPI(EmulatedBackend):
    """``ProcessGroupMPI``; the environment, not MPI itself, says which rank this is."""

    backend_name = "mpi"
    backend_type = ProcessGroup.BackendType.MPI
    world: ClassVar[tuple[int, int]] = (0, 1)
    """(rank, world size) of the installation in force."""

    @classmethod
    def create(cls, ranks: Sequence[int]) -> EmulatedMPI | None:
        """Return the backend of the group ``ranks`` (empty: the world); None outside it."""
        rank, world_size = cls.world
        if not ranks:
            return cls(None, rank, world_size)
        return cls(None, list(ranks).index(rank), len(ranks)) if rank in ranks else None


BY_NAME: dict[str, type[EmulatedBackend]] = {
    "nccl": EmulatedNCCL,
    "nccl-legacy": EmulatedNCCL,
    "nccl2": EmulatedNCCL,
    "gloo": EmulatedGloo,
    "ucc": EmulatedUCC,
    "xccl": EmulatedXCCL,
    "mpi": EmulatedMPI,
}
"""Backends that torch 2.14 and later create through its plugin table, like third-party ones."""


def create_by_name(name: str, options: Any, backend_options: Any) -> EmulatedBackend | None:
    """Return the backend that torch's plugin ``name`` would create; None outside an MPI group.

    Args:
        name: plugin name in lower case.
        options: torch's ``_DistributedBackendOptions``.
        backend_options: options that the program gave to ``init_process_group`` or ``new_group``.
    """
    kind = BY_NAME.get(name, EmulatedBackend)
    if issubclass(kind, EmulatedMPI):
        return kind.create(options.global_ranks_in_group)
    backend = kind(
        options.store,
        options.group_rank,
        options.group_size,
        backend_options,
        timeout=options.timeout if name in BY_NAME else None,
    )
    backend.backend_name = name if kind is EmulatedBackend else kind.backend_name  # type: ignore[misc]
    return backend


def _anchor(rank: int, size: int) -> Any:
    fake: Any = c10d.FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    return fake._create_internal(rank, size, options)
