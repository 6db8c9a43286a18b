"""The null device of one process, under a captured program, and the record of what it emulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import DistBackendError

from prismscale.analysis.emulated import Emulated, LibraryUse
from prismscale.cluster import Device
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.cost.nccl.nccl_memory import settings_from_environment
from prismscale.devices.null import custom_kernels, symmetric_memory
from prismscale.devices.null.compiled import eager_regions
from prismscale.devices.null.device import ModelledMemoryTracker, NullDevice
from prismscale.devices.null.gpus import target_gpu
from prismscale.devices.null.graphs.null_graph import NullGraph
from prismscale.devices.null.kernel_ledger import KernelLedger
from prismscale.devices.null.libraries.stand_in import from_file
from prismscale.devices.null.memory.oom_report import occupants
from prismscale.devices.null.memory.outside_memory import OutsideMemory
from prismscale.devices.null.runtime import activate
from prismscale.devices.null.saves.checkpoints import CheckpointLedger, CheckpointSaves
from prismscale.devices.null.saves.host_copies import HostCopies
from prismscale.devices.null.value_policy import ValuePolicy
from prismscale.devices.routing import Routing
from prismscale.devices.stand_in_file import StandInFile
from prismscale.devices.storage import Storage
from prismscale.emulation.logical_time import answering_time


class NullEmulation:
    """The null device of one process, with its memory, kernel and checkpoint ledgers."""

    def __init__(
        self,
        gpu: Device,
        *,
        devices_per_node: int,
        devices_per_domain: int,
        costs: KernelCostSource,
        routing: Routing | None = None,
        stand_ins: Iterable[StandInFile] = (),
        storage: Storage | None = None,
    ) -> None:
        """
        Args:
            gpu: the GPU, as the cluster file describes it.
            devices_per_node: number of GPUs that the program sees.
            devices_per_domain: number of GPUs that reach each other over NVLink.
            costs: source of the kernels' costs.
            routing: share of tokens that each expert gets; None: equal shares.
            stand_ins: Python files that are imported in place of CUDA binaries.
            storage: speed at which checkpoints are written; None: the default assumption.

        Raises:
            UsageError: the GPU is not known, or the null device cannot be activated here.
            FormatError: a table of costs is damaged.
        """
        spec = target_gpu(gpu, devices_per_node=devices_per_node)
        model = costs.model(gpu)
        self._routing = routing or Routing()
        self._runtime = activate(spec, policy=self._policy(0), lower=not costs.fused)
        self.library = self._runtime.library
        self._runtime.stand_ins.add(from_file(file) for file in stand_ins)
        self.kernels = KernelLedger(self._runtime, model)
        self.device = NullDevice(self._runtime)
        self.outside = OutsideMemory(
            self.library,
            context_bytes=spec.context_bytes,
            settings=settings_from_environment(
                spec.nccl_channels, devices_per_domain, sharp=spec.nvlink_sharp
            ),
        )
        symmetric_memory.install(devices_per_domain, self.outside.hold_symmetric)
        self.memory = ModelledMemoryTracker(self._runtime, self.outside)
        self.checkpoints = CheckpointLedger(
            self.library, storage or Storage(), lambda: self.kernels.n_steps
        )
        copies = HostCopies(self._runtime.ledger)
        self._saves = CheckpointSaves(self.library, self.checkpoints, copies)

    @contextmanager
    def around_program(self) -> Iterator[None]:
        """Run the program within this block.

        Its timers return logical time, and its checkpoints are discarded. An out-of-memory error
        gets a note on what held the memory, a missing module one on how to provide it. An error
        that hides the out-of-memory error is replaced by it.
        """
        library = self.library
        with answering_time(library.ps_host_time_ns, library.ps_advance_host), self._saves.active():
            try:
                yield
            except Exception as error:
                cause = _ran_out_of_memory(error)
                if cause is not None:
                    cause.add_note(self._occupants())
                elif isinstance(error, ModuleNotFoundError):
                    custom_kernels.explain_missing(error)
                    self._runtime.stand_ins.explain_missing(error)
                if cause is None or cause is error:
                    raise
                cause.add_note(f"The program then raised {type(error).__name__}: {error}")
                raise cause from None

    def optimizer_ended(self) -> None:
        """Note the end of an optimizer call, which may be the end of a step."""
        self.kernels.optimizer_ended()
        if len(self._routing.loads) > 1:
            self._runtime.ledger.policy = self._policy(self.kernels.n_steps)

    def _policy(self, step: int) -> ValuePolicy:
        routing = self._routing
        loads = routing.loads[step % len(routing.loads)] if routing.loads else ()
        return ValuePolicy(
            routing=loads, routing_of_ranks=routing.of_ranks, routing_exponent=routing.exponent
        )

    @property
    def n_graphs(self) -> int:
        """Number of CUDA graphs that this process has captured."""
        return NullGraph.n_captured

    @property
    def prepares_graphs(self) -> bool:
        """Whether the program keeps random generator state that CUDA graphs can use."""
        return bool(self.library.ps_has_graph_states())

    def save(self, path: Path, first: int, stop: int) -> None:
        """Write to ``path`` what was emulated; raises :class:`StorageError`.

        That is: the kernels of the step whose optimizer calls are ``[first, stop)``, the values
        that were invented, the checkpoints written, the stand-in libraries used and the compiled
        regions that ran eagerly.
        """
        Emulated(
            kernels=tuple(self.kernels.uses(first, stop)),
            values=tuple(self._runtime.ledger.uses()),
            checkpoints=tuple(self.checkpoints.uses),
            libraries=tuple(
                LibraryUse(
                    name=library.name,
                    version=library.version,
                    namespace=library.namespace,
                    modules=tuple(library.modules),
                )
                for library in self._runtime.stand_ins.used
            ),
            eager_regions=tuple(eager_regions.found()),
        ).save(path)

    def _occupants(self) -> str:
        library = self._runtime.library
        steps = self.kernels.n_steps
        when = (
            f"in step {steps + 1}, after {steps} optimizer calls"
            if steps
            else "before the first optimizer call"
        )
        head = f"Out of memory {when}. What held the memory of this GPU:"
        return "\n".join([head, *occupants(library, library.ps_current_device())])


def _ran_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error behind ``error``: itself, or one in its ``__context__`` chain.

    For example, when an out-of-memory error breaks off a CUDA graph capture, the end of the capture
    raises another error in its place.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, (torch.OutOfMemoryError, DistBackendError)):
        found = found.__context__
    return found
