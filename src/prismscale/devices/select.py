"""Makes the device of a rank's process ready, before the program's first line."""

from __future__ import annotations

import os

import torch

from prismscale.cost.kernel_changes import KernelChange
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.devices.cuda import start_cuda
from prismscale.devices.null.session import NullEmulation
from prismscale.devices.rank_spec import RankSpec
from prismscale.devices.router_watch import RouterWatch
from prismscale.devices.storage import Storage


def router_watch(spec: RankSpec) -> RouterWatch | None:
    """Watches the routers of a rank whose device computes."""
    return None if spec.device == "null" else RouterWatch(spec.routing, spec.device)


def start_device(spec: RankSpec, changes: tuple[KernelChange, ...] = ()) -> NullEmulation | None:
    """Start ``spec.device``; the emulation where the device is not there, with ``changes`` of what
    its kernels cost.

    Raises:
        UsageError: there is no such device here, and it cannot be made up.
    """
    if spec.device == "null":
        return NullEmulation(
            spec.gpu,
            memory_bytes=spec.gpu_memory_bytes,
            devices_per_node=spec.local_world_size,
            costs=KernelCostSource(table=spec.kernels, fused=spec.fused, changes=changes),
            routing=spec.routing,
            stand_ins=spec.stand_ins,
            storage=Storage(write_bytes_per_s=spec.storage_bytes_per_s),
        )
    if spec.device == "cuda":
        start_cuda()
    elif "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() != 1:
        # What torchrun sets comes too late for a torch that is imported already.
        torch.set_num_threads(1)
    return None
