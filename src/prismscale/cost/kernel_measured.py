"""Kernel times measured on a GPU, by signature, which replace the model's.

The table is a JSON file::

    {"version": 1, "device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "date": "2026-01-31",
     "kernels": [{"signature": "aten::mm␟…", "device_ns": 151000, "host_ns": 9000,
                  "spread": 0.01}], "left_out": {"mine::scale␟…": "why"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from prismscale.cluster import Calibration, Device
from prismscale.cost.kernel import FUSED_KINDS, KernelCost, KernelModel
from prismscale.cost.kernel_changes import HostFactor, KernelChange, KernelFactor, changed_kernels
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_signature import FIELD, parse_signature
from prismscale.cost.target_gpu import kernel_model_of
from prismscale.errors import FormatError, UsageError, shown
from prismscale.files import write_json
from prismscale.typed_files import decode, read_json

VERSION = 1
LONGEST_NS = 2**56
"""Longest time of a kernel, the same limit as for any node in prismscale's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredKernel:
    """One distinct call as a GPU ran it."""

    signature: str
    """Signature of the call, or an operator's name alone (``mine::scale``) for all calls of it."""
    device_ns: int
    """Median time on the device."""
    host_ns: int
    """Median host time of issuing the call."""
    spread: float
    """Half the distance between the 5th and 95th percentile, relative to the median."""

    def __post_init__(self) -> None:
        if self.device_ns < 0 or self.host_ns < 0 or self.spread < 0:
            raise UsageError("times and spread of a measured kernel must be 0 or more")
        if max(self.device_ns, self.host_ns) >= LONGEST_NS:
            raise UsageError("a measured kernel takes less than two years")


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Measurements of one GPU."""

    device: str
    """Name that ``torch.cuda.get_device_name`` returns."""
    torch: str
    date: str
    kernels: tuple[MeasuredKernel, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons why signatures could not be measured, by signature."""
    version: int = VERSION

    @cached_property
    def by_signature(self) -> Mapping[str, MeasuredKernel]:
        """The measurements by signature."""
        return {kernel.signature: kernel for kernel in self.kernels}

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> KernelTable:
        """Read what :meth:`save` wrote.

        Raises:
            UsageError: there is no such file.
            FormatError: the file is of another kind or version, or damaged.
        """
        if not path.exists():
            raise UsageError(f"cannot read kernel table '{path}': there is no such file")
        found = read_json(path)
        version = found.get("version") if isinstance(found, dict) else None
        if version != VERSION:
            raise FormatError(
                f"{path}: version {shown(version)} of kernel tables; this program reads {VERSION}: "
                "measure again with prismscale profile-kernels"
            )
        return decode(KernelTable, found, str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredKernels:
    """Takes costs from a table where it has them, and from another model elsewhere."""

    table: KernelTable
    otherwise: KernelModel
    fused: bool = False
    """Whether kinds of kernels that a compiler fuses keep the other model's cost. Their measured
    single costs do not add up to the cost of the fused kernel."""

    def cost(self, signature: str) -> KernelCost:
        """Return the measured cost, with source ``measured`` and its spread as the error.

        Calls without a measurement take the other model's cost.
        """
        known = self.table.by_signature
        kernel = known.get(signature) or known.get(signature.partition(FIELD)[0])
        if kernel is None:
            return self.otherwise.cost(signature)
        kind = kind_of(parse_signature(signature))
        if self.fused and kind in FUSED_KINDS:
            return self.otherwise.cost(signature)
        return KernelCost(
            device_ns=kernel.device_ns,
            host_ns=kernel.host_ns,
            source="measured",
            error=kernel.spread,
            kind=kind,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCostSource:
    """Source of a job's kernel costs, apart from the target GPU."""

    table: str = ""
    """File of measurements that replace the model's figures; empty for none."""
    fused: bool = False
    """Whether elementwise work costs what it does in the kernels that torch.compile makes of it."""
    changes: tuple[KernelChange, ...] = ()
    """What-ifs on top of model and table."""

    def model(self, device: Device) -> KernelModel:
        """Return the kernel model of ``device`` with these costs.

        Raises:
            UsageError: there is no such GPU or file, or the table is another GPU's.
            FormatError: the file is not a kernel table.
        """
        return changed_kernels(self._unchanged(device), self.changes)

    def _unchanged(self, device: Device) -> KernelModel:
        modelled = kernel_model_of(device, fused=self.fused)
        calibrated = changed_kernels(modelled, _factors(device.calibration))
        if not self.table:
            return calibrated
        table = KernelTable.load(Path(self.table))
        if table.device != modelled.profile.device:
            raise UsageError(
                f"the kernels in '{self.table}' were measured on {table.device}; the cluster's GPU "
                f"is {modelled.profile.device}: measure there, or take a cluster of that GPU"
            )
        return MeasuredKernels(table=table, otherwise=calibrated, fused=self.fused)


def _factors(calibration: Calibration | None) -> tuple[KernelChange, ...]:
    """Return a calibration's factors, for all costs that a model answers."""
    if calibration is None:
        return ()
    kernels = KernelFactor(pattern=".*", factor=calibration.kernels)
    return kernels, HostFactor(factor=calibration.host)
